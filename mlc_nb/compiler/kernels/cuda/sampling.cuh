// The next token of each row of logits, by the rules of mlc_nb/runtime/sampler.py: bias, penalties, mask, temperature,
// top-k, top-p, min-p, then the inverse of the cumulative distribution at one uniform number.
//
// The vocabulary is never sorted. A histogram of the logits tells which few thousand of them can be among the likeliest
// that are wanted; those alone are sorted, in shared memory. Where a flat distribution leaves too many, the bounds are
// found by bisection over the whole row: slower, the same answer. Sums have a fixed order.

struct SamplingArguments {
    const float* logits;        // [rows, vocabulary]
    float* adjusted;            // [rows, vocabulary] to work in
    const float* options;       // [rows, 8]: temperature, top_p, min_p, presence, frequency, repetition penalty
    const int* choices;         // [rows, 8]: top_k, flags, slot (negative: no row), biases, top logprobs
    const double* uniforms;     // [rows]
    const u32* masks;           // [rows, (vocabulary + 31) / 32]: a set bit allows a token
    const int* bias_ids;        // [rows, bias_width]
    const float* bias_values;   // [rows, bias_width]
    int* counts;                // [slots, vocabulary]: how often a slot's sequence has picked each token
    int* token_ids;             // [rows]; -1 where the logits are not numbers
    float* logprobs;            // [rows]
    int* top_ids;               // [rows, MOST_TOP_LOGPROBS]
    float* top_logprobs;        // [rows, MOST_TOP_LOGPROBS]
    int bias_width;
};

enum SamplingFlags { USES_MASK = 1, USES_PENALTIES = 2 };

template <int VOCABULARY>
struct Sampler {
    static const int THREADS = 1024, WARPS = 32;
    static const int CANDIDATES = 4096;
    static const int MOST_TOP_LOGPROBS = 20;
    static constexpr float LOG2_E = 1.44269504f;
    static const int BINS = 1024;
    static const int SEGMENTS = 256;
    static const int SEGMENT = (VOCABULARY + SEGMENTS * 128 - 1) / (SEGMENTS * 128) * 128;

    struct Shared {
        u64 candidates[CANDIDATES];
        u32 bin_counts[BINS];
        double doubles[WARPS];
        double segments[SEGMENTS];
        u64 keys[WARPS];
        u32 words[WARPS];
        double total;
        int found;
        int count;
    };

    // Larger is likelier; equal logits: the lower id.
    static INLINE u64 key_of(float logit, int id) {
        u32 bits = __float_as_uint(logit);
        bits = bits & 0x80000000 ? ~bits : bits | 0x80000000;
        return (u64)bits << 32 | (u32)~id;
    }

    static INLINE int id_of(u64 key) { return (int)~(u32)key; }

    static INLINE double sum_over_block(double value, Shared& shared) {
        for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
        __syncthreads();
        if (threadIdx.x % 32 == 0) shared.doubles[threadIdx.x / 32] = value;
        __syncthreads();
        value = shared.doubles[threadIdx.x % 32];
        for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
        return value;
    }

    static INLINE u64 largest_over_block(u64 key, Shared& shared) {
        for (int offset = 16; offset > 0; offset /= 2) {
            u64 other = __shfl_xor_sync(0xffffffff, key, offset);
            key = other > key ? other : key;
        }
        __syncthreads();
        if (threadIdx.x % 32 == 0) shared.keys[threadIdx.x / 32] = key;
        __syncthreads();
        key = shared.keys[threadIdx.x % 32];
        for (int offset = 16; offset > 0; offset /= 2) {
            u64 other = __shfl_xor_sync(0xffffffff, key, offset);
            key = other > key ? other : key;
        }
        return key;
    }

    // Calls visit(id, logit) for ids of this thread; several loads are on their way at once.
    template <class Visit>
    static INLINE void each(const float* logits, Visit visit) {
        if constexpr (VOCABULARY % 4 == 0) {
            const int vectors = VOCABULARY / 4, at_once = 4;
            for (int first = threadIdx.x; first < vectors; first += at_once * THREADS) {
                float4 loaded[at_once];
#pragma unroll
                for (int i = 0; i < at_once; ++i) {
                    if (first + i * THREADS < vectors) loaded[i] = ((const float4*)logits)[first + i * THREADS];
                }
#pragma unroll
                for (int i = 0; i < at_once; ++i) {
                    int id = 4 * (first + i * THREADS);
                    if (id >= VOCABULARY) break;
                    visit(id, loaded[i].x);
                    visit(id + 1, loaded[i].y);
                    visit(id + 2, loaded[i].z);
                    visit(id + 3, loaded[i].w);
                }
            }
        } else {
            for (int id = threadIdx.x; id < VOCABULARY; id += THREADS) visit(id, logits[id]);
        }
    }

    // Sum of the values of this thread and those before it.
    static INLINE double inclusive_scan(double value, Shared& shared) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        value = scan_in_warp(value, lane);
        __syncthreads();
        if (lane == 31) shared.doubles[warp] = value;
        __syncthreads();
        double before = scan_in_warp(shared.doubles[lane], lane);
        before = __shfl_sync(0xffffffff, before, warp == 0 ? 0 : warp - 1);
        return warp == 0 ? value : value + before;
    }

    static INLINE double scan_in_warp(double value, int lane) {
        for (int offset = 1; offset < 32; offset *= 2) {
            double other = __shfl_up_sync(0xffffffff, value, offset);
            if (lane >= offset) value += other;
        }
        return value;
    }

    // The first id, in order, at which the sum of weight(logit) passes target * (sum of all, where relative); the last
    // with any weight if rounding lets none.
    template <class Weight>
    static INLINE int walk(const float* logits, Weight weight, double target, bool relative, Shared& shared) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (int i = warp * (SEGMENTS / WARPS); i < (warp + 1) * (SEGMENTS / WARPS); ++i) {
            float part = 0;
            if constexpr (VOCABULARY % 4 == 0) {
#pragma unroll
                for (int k = 0; k < SEGMENT / 128; ++k) {
                    int id = i * SEGMENT + k * 128 + lane * 4;
                    if (id < VOCABULARY) {
                        float4 loaded = *(const float4*)(logits + id);
                        part += (weight(loaded.x) + weight(loaded.y)) + (weight(loaded.z) + weight(loaded.w));
                    }
                }
            } else {
                for (int id = i * SEGMENT + lane; id < (i + 1) * SEGMENT && id < VOCABULARY; id += 32) {
                    part += weight(logits[id]);
                }
            }
            double sum = part;
            for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
            if (lane == 0) shared.segments[i] = sum;
        }
        __syncthreads();
        if (warp == 0) {
            const int each = SEGMENTS / 32;
            double sum = 0;
            for (int i = 0; i < each; ++i) sum += shared.segments[lane * each + i];
            double scanned = scan_in_warp(sum, lane);
            if (relative) target *= __shfl_sync(0xffffffff, scanned, 31);
            u32 passed = __ballot_sync(0xffffffff, scanned > target);
            u32 any = __ballot_sync(0xffffffff, sum > 0);
            int at = passed ? __ffs(passed) - 1 : 31 - __clz(any | 1);
            double before = __shfl_sync(0xffffffff, scanned, at == 0 ? 0 : at - 1);
            if (at == 0) before = 0;
            int segment = at * each, last = segment;
            for (; segment < at * each + each; ++segment) {
                double next = before + shared.segments[segment];
                if (shared.segments[segment] > 0) last = segment;
                if (passed && next > target) break;
                if (segment + 1 < at * each + each) before = next;
            }
            if (segment == at * each + each) segment = last;
            int found = -1, last_id = 0;
            for (int base = segment * SEGMENT; base < (segment + 1) * SEGMENT; base += 32) {
                double value = base + lane < VOCABULARY ? weight(logits[base + lane]) : 0.0f;
                double cumulative = before + scan_in_warp(value, lane);
                u32 past = __ballot_sync(0xffffffff, cumulative > target && value > 0);
                u32 weighty = __ballot_sync(0xffffffff, value > 0);
                if (weighty) last_id = base + 31 - __clz(weighty);
                if (past) {
                    found = base + __ffs(past) - 1;
                    break;
                }
                before = __shfl_sync(0xffffffff, cumulative, 31);
            }
            if (lane == 0) shared.found = found < 0 ? last_id : found;
        }
        __syncthreads();
        return shared.found;
    }

    // Logits of a row as the sampler sees them; weights are exponentials to the base 2.
    struct Row {
        const float* logits;
        float largest, factor;

        INLINE float weight(float logit) const { return power_of_two((logit - largest) * factor); }
    };

    // Bins cover weights down to 2^-32; what lies below has no mass to speak of.
    static INLINE int bin_of(const Row& row, float logit) {
        float scaled = (row.largest - logit) * row.factor * (BINS / 32.0f);
        return scaled < BINS ? (int)scaled : BINS;
    }

    // Sorts the likeliest into shared.candidates (weight bits inverted, then id) and returns how many there are: at
    // least `least` of them, or so many that they hold about `share` of the mass of all, which goes to `everything`.
    // Negative if that is more than fit.
    static INLINE int collect(const Row& row, int least, float share, double& everything, Shared& shared) {
        shared.bin_counts[threadIdx.x] = 0;
        if (threadIdx.x == 0) {
            shared.count = 0;
            shared.found = BINS - 1;
        }
        __syncthreads();
        float mass = 0;
        each(row.logits, [&](int, float logit) {
            mass += row.weight(logit);
            int bin = bin_of(row, logit);
            if (bin < BINS) atomicAdd(&shared.bin_counts[bin], 1u);
        });
        everything = sum_over_block(mass, shared);
        u32 in_bin = shared.bin_counts[threadIdx.x];
        double counted = inclusive_scan((double)in_bin, shared);
        double middle = power_of_two(-(threadIdx.x + 0.5f) * (32.0f / BINS));
        double held = inclusive_scan(in_bin * middle, shared);
        if (least > 0 ? counted >= least : held >= (share + 0.001f) * everything) {
            atomicMin(&shared.found, (int)threadIdx.x);
        }
        __syncthreads();
        // One bin more: its neighbours may round to the weight of the last one wanted.
        int last_bin = shared.found + 1 < BINS ? shared.found + 1 : BINS - 1;
        if (threadIdx.x == last_bin) shared.total = counted;
        __syncthreads();
        if (shared.total > CANDIDATES) return -1;
        int count = (int)shared.total, size = 32;
        while (size < count) size *= 2;
        for (int i = count + threadIdx.x; i < size; i += THREADS) shared.candidates[i] = ~0ull;
        each(row.logits, [&](int id, float logit) {
            if (bin_of(row, logit) <= last_bin) {
                int at = atomicAdd(&shared.count, 1);
                shared.candidates[at] = (u64)~__float_as_uint(row.weight(logit)) << 32 | (u32)id;
            }
        });
        __syncthreads();
        for (int width = 2; width <= size; width *= 2) {
            for (int stride = width / 2; stride > 0; stride /= 2) {
                for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                    int low = i / stride * stride * 2 + i % stride, high = low + stride;
                    u64 a = shared.candidates[low], b = shared.candidates[high];
                    if ((a > b) == ((low & width) == 0)) {
                        shared.candidates[low] = b;
                        shared.candidates[high] = a;
                    }
                }
                __syncthreads();
            }
        }
        return count;
    }

    static INLINE float candidate_weight(const Shared& shared, int at) {
        return __uint_as_float(~(u32)(shared.candidates[at] >> 32));
    }

    // The id that `uniform` falls on among the sorted candidates; negative if top-p needs more than these.
    static INLINE int draw_candidate(int count, int top_k, float top_p, float min_p, double everything, double uniform,
                                     Shared& shared) {
        const int each = CANDIDATES / THREADS;
        float weight[each];
        double cumulative[each], sum = 0;
        int first = threadIdx.x * each, kept = top_k > 0 && top_k < count ? top_k : count;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            weight[i] = first + i < kept ? candidate_weight(shared, first + i) : 0.0f;
            sum += weight[i];
            cumulative[i] = sum;
        }
        double before = inclusive_scan(sum, shared) - sum;
#pragma unroll
        for (int i = 0; i < each; ++i) cumulative[i] += before;
        if (top_p < 1.0f) {
            if (top_k > 0) {
                publish(cumulative, first, kept - 1, shared);
                everything = shared.total;
            }
            kept = first_index(cumulative, first, kept, top_p * everything, true, kept, shared) + 1;
            if (kept > count) return -1;
        }
        if (min_p > 0.0f) {
            if (threadIdx.x == 0) shared.count = 0;
            __syncthreads();
            int passing = 0;
#pragma unroll
            for (int i = 0; i < each; ++i) passing += first + i < kept && weight[i] >= min_p;
            if (passing) atomicAdd(&shared.count, passing);
            __syncthreads();
            kept = shared.count;
        }
        publish(cumulative, first, kept - 1, shared);
        int at = first_index(cumulative, first, kept, uniform * shared.total, false, kept - 1, shared);
        return (int)(u32)shared.candidates[at];
    }

    // shared.total = cumulative at an index.
    template <int EACH>
    static INLINE void publish(const double (&cumulative)[EACH], int first, int index, Shared& shared) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (first + i == index) shared.total = cumulative[i];
        }
        __syncthreads();
    }

    // The first index below `end` whose cumulative weight reaches (or passes) target, else `otherwise`.
    template <int EACH>
    static INLINE int first_index(const double (&cumulative)[EACH], int first, int end, double target, bool reaches,
                                  int otherwise, Shared& shared) {
        __syncthreads();
        if (threadIdx.x == 0) shared.found = otherwise;
        __syncthreads();
#pragma unroll
        for (int i = EACH - 1; i >= 0; --i) {
            bool there = reaches ? cumulative[i] >= target : cumulative[i] > target;
            if (first + i < end && there) atomicMin(&shared.found, first + i);
        }
        __syncthreads();
        return shared.found;
    }

    // What is at least as likely as a weight, given by its bits: how many, and their mass.
    static INLINE void at_least(const Row& row, u32 bits, double& count, double& mass, Shared& shared) {
        double tokens = 0, sum = 0;
        each(row.logits, [&](int, float logit) {
            float weight = row.weight(logit);
            if (__float_as_uint(weight) >= bits) {
                tokens += 1;
                sum += weight;
            }
        });
        count = sum_over_block(tokens, shared);
        mass = sum_over_block(sum, shared);
    }

    // The largest weight (its bits) for which everything at least as likely reaches `target` in count or mass (passes
    // it, where strict); count and mass of what is likelier.
    static INLINE u32 bisect(const Row& row, double target, bool by_count, bool strict, double& count, double& mass,
                             Shared& shared) {
        u32 low = 0, high = 0x3f800001;  // weights are at most 1; at low the target is reached, at high it is not
        count = mass = 0;
        while (high - low > 1) {
            u32 middle = (low + high) / 2;
            double tokens, sum;
            at_least(row, middle, tokens, sum, shared);
            double reached = by_count ? tokens : sum;
            if (strict ? reached > target : reached >= target) {
                low = middle;
            } else {
                high = middle;
                count = tokens;
                mass = sum;
            }
        }
        return low;
    }

    // As draw_candidate, for any number of candidates.
    static INLINE int draw_by_bisection(const Row& row, int top_k, float top_p, float min_p, double everything,
                                        double uniform, Shared& shared) {
        double count, mass, kept_mass = everything;
        u32 bound = 0;
        if (top_k > 0) {
            bound = bisect(row, top_k, true, false, count, mass, shared);
            kept_mass = mass + (top_k - count) * (double)__uint_as_float(bound);
        }
        if (top_p < 1.0f) {
            bound = bisect(row, top_p * kept_mass, false, false, count, mass, shared);
            double each = __uint_as_float(bound), ties = each > 0 ? ceil((top_p * kept_mass - mass) / each) : 1;
            kept_mass = mass + (ties < 1 ? 1 : ties) * each;
        }
        if (min_p > 0.0f && __float_as_uint(min_p) > bound) {
            at_least(row, __float_as_uint(min_p), count, kept_mass, shared);
        }
        u32 drawn = bisect(row, uniform * kept_mass, false, true, count, mass, shared);
        double each = __uint_as_float(drawn), skipped = each > 0 ? floor((uniform * kept_mass - mass) / each) : 0;
        return walk(
            row.logits, [&](float logit) { return __float_as_uint(row.weight(logit)) == drawn ? 1.0f : 0.0f; },
            skipped < 0 ? 0.0 : skipped, false, shared);
    }

    static INLINE float penalize(float logit, int times, const float* options) {
        if (times == 0) return logit;
        logit -= options[3] + times * options[4];
        return logit > 0 ? logit / options[5] : logit * options[5];
    }

    // Grid: rows.
    static INLINE void run(const SamplingArguments& arguments) {
        __shared__ Shared shared;
        let_next_kernel_start();
        wait_for_previous_kernel();
        int number = blockIdx.x;
        const int* choices = arguments.choices + number * 8;
        const float* options = arguments.options + number * 8;
        if (choices[2] < 0) return;
        const float* raw = arguments.logits + (size_t)number * VOCABULARY;
        float* adjusted = arguments.adjusted + (size_t)number * VOCABULARY;
        const u32* mask = arguments.masks + (size_t)number * ((VOCABULARY + 31) / 32);
        int* counts = arguments.counts + (size_t)choices[2] * VOCABULARY;
        bool masked = choices[1] & USES_MASK, penalized = choices[1] & USES_PENALTIES;
        bool adjusts = masked || penalized || choices[3] > 0;

        // Every logarithm to the base 2 here; the largest logit so far, and the sum of weights relative to it.
        float highest = -1e30f, relative = 0;
        bool damaged = false;
        u64 best = 0;
        each(raw, [&](int id, float logit) {
            damaged |= !(fabsf(logit) <= 1e30f) && !(logit < 0);
            if (logit > highest) {
                best = key_of(logit, id);
                relative *= power_of_two((highest - logit) * LOG2_E);
                highest = logit;
            }
            relative += power_of_two((logit - highest) * LOG2_E);
            if (adjusts) {
                if (penalized) logit = penalize(logit, counts[id], options);
                if (masked && !(mask[id / 32] >> id % 32 & 1)) logit = -__int_as_float(0x7f800000);
                adjusted[id] = logit;
            }
        });
        damaged = __syncthreads_or(damaged);
        u64 raw_best = largest_over_block(best, shared);
        damaged |= raw_best == 0;
        float largest = damaged ? 0.0f : raw[id_of(raw_best)];
        double log_total = largest + log(sum_over_block(relative * power_of_two((highest - largest) * LOG2_E), shared));

        Row row = {raw, largest, LOG2_E / options[0]};
        u64 top = raw_best;
        if (adjusts && !damaged) {
            for (int i = threadIdx.x; i < choices[3]; i += THREADS) {
                int id = arguments.bias_ids[(size_t)number * arguments.bias_width + i];
                float logit = raw[id] + arguments.bias_values[(size_t)number * arguments.bias_width + i];
                if (penalized) logit = penalize(logit, counts[id], options);
                if (!masked || mask[id / 32] >> id % 32 & 1) adjusted[id] = logit;
            }
            __syncthreads();
            best = 0;
            each(adjusted, [&](int id, float logit) {
                u64 key = key_of(logit, id);
                best = key > best ? key : best;
            });
            top = largest_over_block(best, shared);
            row.logits = adjusted;
            row.largest = adjusted[id_of(top)];
            damaged = !(fabsf(row.largest) < __int_as_float(0x7f800000));
        }
        if (damaged) {
            if (threadIdx.x == 0) arguments.token_ids[number] = -1;
            return;
        }
        int token = id_of(top);
        if (options[0] >= 1e-5f) {
            token = draw(row, choices[0], options[1], options[2], arguments.uniforms[number], shared);
        }
        if (threadIdx.x == 0) {
            arguments.token_ids[number] = token;
            arguments.logprobs[number] = (float)(raw[token] - log_total);
            if (penalized) counts[token] += 1;
        }
        u64 below = ~0ull;
        for (int i = 0; i < choices[4] && i < MOST_TOP_LOGPROBS; ++i) {
            best = 0;
            each(raw, [&](int id, float logit) {
                u64 key = key_of(logit, id);
                if (key < below && key > best) best = key;
            });
            below = largest_over_block(best, shared);
            if (threadIdx.x == 0) {
                arguments.top_ids[number * MOST_TOP_LOGPROBS + i] = id_of(below);
                arguments.top_logprobs[number * MOST_TOP_LOGPROBS + i] = (float)(raw[id_of(below)] - log_total);
            }
        }
    }

    static INLINE int draw(const Row& row, int top_k, float top_p, float min_p, double uniform, Shared& shared) {
        if (top_k >= VOCABULARY) top_k = 0;
        if (top_k <= 0 && top_p >= 1.0f) {
            return walk(
                row.logits,
                [&](float logit) {
                    float weight = row.weight(logit);
                    return weight >= min_p ? weight : 0.0f;
                },
                uniform, true, shared);
        }
        double everything = 0;
        int token = -1;
        if (top_k <= CANDIDATES) {
            int count = collect(row, top_k, top_p, everything, shared);
            if (count >= 0) token = draw_candidate(count, top_k, top_p, min_p, everything, uniform, shared);
        }
        return token >= 0 ? token : draw_by_bisection(row, top_k, top_p, min_p, everything, uniform, shared);
    }
};
