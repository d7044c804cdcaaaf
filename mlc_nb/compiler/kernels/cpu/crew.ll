; The crew: threads that share the parallel loops of a step. crew.py says why, and fills in what begins with a dollar.
;
; A launch cuts a loop into tasks and gives each thread a range of them. A thread takes its own from the front; when it
; has none left, it takes the others' from the back. Whoever has claimed a task reads what to run after the claim, so a
; thread that was put aside between two launches does the right thing whenever it comes back.

target triple = "$triple"

; One cache line for each group of words that different threads write.
%Range = type { i64, [56 x i8] }             ; first task in the low half, end in the high half
%Environment = type { ptr, i32 }             ; TVM's: a handle for barriers (unused) and the number of tasks
%Crew = type {
  i32, [60 x i8],                            ;  0 epoch: launches so far; idle threads sleep on it
  i32, [60 x i8],                            ;  2 pending: tasks that are not done; the launcher sleeps on it
  i32, [60 x i8],                            ;  4 sleepers: threads that sleep on epoch or are about to
  i32, [60 x i8],                            ;  6 launcher_sleeps: whether the launcher does so on pending
  ptr, ptr, %Environment, i32, i32, i32,     ;  8 body, 9 data, 10 environment, 11 failed, 12 ending, 13 threads
  [12 x i8],
  [0 x %Range]                               ; 15 ranges, one a thread
}
%Any = type { i32, i32, i64 }                ; a value of TVM's calling convention: type, padding, payload

@crew = internal global ptr null
@__TVMBackendParallelLaunch = external global ptr
@kind = private constant [13 x i8] c"RuntimeError\00"
@message = private constant [43 x i8] c"a task of a parallel loop reported failure\00"

declare i64 @syscall(i64, ...)
declare void @TVMFFIErrorSetRaisedFromCStr(ptr, ptr)
declare void $pause_declaration

; Spins before a thread sleeps: some 50 microseconds, enough for the gaps between the loops of one step.
@spins = private constant i32 2000
; Tasks that a loop is cut into, for each thread.
@tasks_each = private constant i32 16

define internal void @sleep_on(ptr %word, i32 %value) {
  ; FUTEX_WAIT | FUTEX_PRIVATE_FLAG
  call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i32 128, i32 %value, ptr null)
  ret void
}

define internal void @wake(ptr %word) {
  ; FUTEX_WAKE | FUTEX_PRIVATE_FLAG, all of them
  call i64 (i64, ...) @syscall(i64 $futex, ptr %word, i32 129, i32 2147483647)
  ret void
}

; Take a task from the front (1) or the back (-4294967296, which is one less in the high half); -1 where there is none.
define internal i32 @take(ptr %range, i64 %change) {
entry:
  %from_front = icmp eq i64 %change, 1
  br label %try
try:
  %old = load atomic i64, ptr %range seq_cst, align 64
  %begin = trunc i64 %old to i32
  %high = lshr i64 %old, 32
  %end = trunc i64 %high to i32
  %empty = icmp uge i32 %begin, %end
  br i1 %empty, label %none, label %claim
claim:
  %new = add i64 %old, %change
  %result = cmpxchg ptr %range, i64 %old, i64 %new seq_cst seq_cst
  %won = extractvalue { i64, i1 } %result, 1
  br i1 %won, label %done, label %try
done:
  %last = sub i32 %end, 1
  %task = select i1 %from_front, i32 %begin, i32 %last
  ret i32 %task
none:
  ret i32 -1
}

define internal void @run(ptr %crew, i32 %task) {
entry:
  %body_at = getelementptr %Crew, ptr %crew, i32 0, i32 8
  %body = load ptr, ptr %body_at
  %data_at = getelementptr %Crew, ptr %crew, i32 0, i32 9
  %data = load ptr, ptr %data_at
  %environment = getelementptr %Crew, ptr %crew, i32 0, i32 10
  %status = call i32 %body(i32 %task, ptr %environment, ptr %data)
  %is_fine = icmp eq i32 %status, 0
  br i1 %is_fine, label %count, label %fail
fail:
  %failed = getelementptr %Crew, ptr %crew, i32 0, i32 11
  store atomic i32 1, ptr %failed monotonic, align 4
  br label %count
count:
  %pending = getelementptr %Crew, ptr %crew, i32 0, i32 2
  %before = atomicrmw sub ptr %pending, i32 1 seq_cst
  %is_last = icmp eq i32 %before, 1
  br i1 %is_last, label %last, label %done
last:
  %sleeps_at = getelementptr %Crew, ptr %crew, i32 0, i32 6
  %sleeps = load atomic i32, ptr %sleeps_at seq_cst, align 4
  %has_to_wake = icmp ne i32 %sleeps, 0
  br i1 %has_to_wake, label %wake_launcher, label %done
wake_launcher:
  call void @wake(ptr %pending)
  br label %done
done:
  ret void
}

; Run tasks, one's own first, until there are none to take.
define internal void @run_all(ptr %crew, i32 %me) {
entry:
  %threads_at = getelementptr %Crew, ptr %crew, i32 0, i32 13
  %threads = load i32, ptr %threads_at
  br label %thread
thread:
  %distance = phi i32 [ 0, %entry ], [ %farther, %next ]
  %sum = add i32 %me, %distance
  %whose = urem i32 %sum, %threads
  %range = getelementptr %Crew, ptr %crew, i32 0, i32 15, i32 %whose
  %is_own = icmp eq i32 %distance, 0
  %change = select i1 %is_own, i64 1, i64 -4294967296
  br label %take_one
take_one:
  %task = call i32 @take(ptr %range, i64 %change)
  %none = icmp eq i32 %task, -1
  br i1 %none, label %next, label %run_one
run_one:
  call void @run(ptr %crew, i32 %task)
  br label %take_one
next:
  %farther = add i32 %distance, 1
  %more = icmp ult i32 %farther, %threads
  br i1 %more, label %thread, label %done
done:
  ret void
}

; What compiled kernels call: run a loop's tasks on all threads and return when they are done; 0, or -1 on failure.
define internal i32 @launch(ptr %body, ptr %data, i32 %wanted) {
entry:
  %crew = load ptr, ptr @crew
  %threads_at = getelementptr %Crew, ptr %crew, i32 0, i32 13
  %threads = load i32, ptr %threads_at
  %each = load i32, ptr @tasks_each
  %is_alone = icmp eq i32 %threads, 1
  %many = mul i32 %threads, %each
  %default = select i1 %is_alone, i32 1, i32 %many
  %is_given = icmp sgt i32 %wanted, 0
  %tasks = select i1 %is_given, i32 %wanted, i32 %default
  %body_at = getelementptr %Crew, ptr %crew, i32 0, i32 8
  store ptr %body, ptr %body_at
  %data_at = getelementptr %Crew, ptr %crew, i32 0, i32 9
  store ptr %data, ptr %data_at
  %tasks_at = getelementptr %Crew, ptr %crew, i32 0, i32 10, i32 1
  store i32 %tasks, ptr %tasks_at
  %failed_at = getelementptr %Crew, ptr %crew, i32 0, i32 11
  store atomic i32 0, ptr %failed_at monotonic, align 4
  %pending = getelementptr %Crew, ptr %crew, i32 0, i32 2
  store atomic i32 %tasks, ptr %pending seq_cst, align 4
  br label %share
share:
  %i = phi i32 [ 0, %entry ], [ %i_next, %share ]
  %i_next = add i32 %i, 1
  %begin_product = mul i32 %i, %tasks
  %begin = udiv i32 %begin_product, %threads
  %end_product = mul i32 %i_next, %tasks
  %end = udiv i32 %end_product, %threads
  %low = zext i32 %begin to i64
  %end_wide = zext i32 %end to i64
  %high = shl i64 %end_wide, 32
  %packed = or i64 %low, %high
  %range = getelementptr %Crew, ptr %crew, i32 0, i32 15, i32 %i
  store atomic i64 %packed, ptr %range seq_cst, align 64
  %more = icmp ult i32 %i_next, %threads
  br i1 %more, label %share, label %announce
announce:
  %epoch = getelementptr %Crew, ptr %crew, i32 0, i32 0
  %announced = atomicrmw add ptr %epoch, i32 1 seq_cst
  %sleepers_at = getelementptr %Crew, ptr %crew, i32 0, i32 4
  %sleepers = load atomic i32, ptr %sleepers_at seq_cst, align 4
  %nobody_sleeps = icmp eq i32 %sleepers, 0
  br i1 %nobody_sleeps, label %work, label %wake_them
wake_them:
  call void @wake(ptr %epoch)
  br label %work
work:
  call void @run_all(ptr %crew, i32 0)
  %most = load i32, ptr @spins
  br label %spin
spin:
  %spun = phi i32 [ 0, %work ], [ %spun_next, %pause ]
  %left = load atomic i32, ptr %pending seq_cst, align 4
  %all_done = icmp eq i32 %left, 0
  br i1 %all_done, label %finish, label %check
check:
  %is_long = icmp uge i32 %spun, %most
  br i1 %is_long, label %sleep, label %pause
pause:
  call void $pause
  %spun_next = add i32 %spun, 1
  br label %spin
sleep:
  %sleeps_at = getelementptr %Crew, ptr %crew, i32 0, i32 6
  store atomic i32 1, ptr %sleeps_at seq_cst, align 4
  br label %look
look:
  %left_now = load atomic i32, ptr %pending seq_cst, align 4
  %done_now = icmp eq i32 %left_now, 0
  br i1 %done_now, label %awake, label %doze
doze:
  call void @sleep_on(ptr %pending, i32 %left_now)
  br label %look
awake:
  store atomic i32 0, ptr %sleeps_at seq_cst, align 4
  br label %finish
finish:
  %failed = load atomic i32, ptr %failed_at monotonic, align 4
  %is_fine = icmp eq i32 %failed, 0
  br i1 %is_fine, label %good, label %bad
good:
  ret i32 0
bad:
  call void @TVMFFIErrorSetRaisedFromCStr(ptr @kind, ptr @message)
  ret i32 -1
}

define internal i64 @argument(ptr %arguments, i32 %index) {
  %at = getelementptr %Any, ptr %arguments, i32 %index, i32 2
  %value = load i64, ptr %at
  ret i64 %value
}

; crew_size(threads) -> bytes of the state.
define i32 @__tvm_ffi_crew_size(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  %threads = call i64 @argument(ptr %arguments, i32 0)
  %end = getelementptr %Crew, ptr null, i32 0, i32 15, i64 %threads
  %size = ptrtoint ptr %end to i64
  %type_at = getelementptr %Any, ptr %result, i32 0, i32 0
  store i32 1, ptr %type_at
  %value_at = getelementptr %Any, ptr %result, i32 0, i32 2
  store i64 %size, ptr %value_at
  ret i32 0
}

; crew_begin(state, threads): from now on the loops of this library are launched by the crew. The state is zeros.
define i32 @__tvm_ffi_crew_begin(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  %address = call i64 @argument(ptr %arguments, i32 0)
  %crew = inttoptr i64 %address to ptr
  %threads = call i64 @argument(ptr %arguments, i32 1)
  %threads_narrow = trunc i64 %threads to i32
  %threads_at = getelementptr %Crew, ptr %crew, i32 0, i32 13
  store i32 %threads_narrow, ptr %threads_at
  store ptr %crew, ptr @crew
  store ptr @launch, ptr @__TVMBackendParallelLaunch
  ret i32 0
}

; crew_work(state, number): be the thread of this number, from 1, until crew_end is called.
define i32 @__tvm_ffi_crew_work(ptr %self, ptr %arguments, i32 %count, ptr %result) {
entry:
  %address = call i64 @argument(ptr %arguments, i32 0)
  %crew = inttoptr i64 %address to ptr
  %number = call i64 @argument(ptr %arguments, i32 1)
  %me = trunc i64 %number to i32
  %epoch = getelementptr %Crew, ptr %crew, i32 0, i32 0
  %sleepers = getelementptr %Crew, ptr %crew, i32 0, i32 4
  %ending_at = getelementptr %Crew, ptr %crew, i32 0, i32 12
  %most = load i32, ptr @spins
  br label %work
work:
  ; Read before looking for tasks: a launch that comes while we look is seen as a change afterwards.
  %seen = load atomic i32, ptr %epoch seq_cst, align 4
  call void @run_all(ptr %crew, i32 %me)
  br label %spin
spin:
  %spun = phi i32 [ 0, %work ], [ %spun_next, %pause ]
  %now = load atomic i32, ptr %epoch seq_cst, align 4
  %is_new = icmp ne i32 %now, %seen
  br i1 %is_new, label %work, label %check
check:
  %is_long = icmp uge i32 %spun, %most
  br i1 %is_long, label %tire, label %pause
pause:
  call void $pause
  %spun_next = add i32 %spun, 1
  br label %spin
tire:
  %ending = load atomic i32, ptr %ending_at seq_cst, align 4
  %ends = icmp ne i32 %ending, 0
  br i1 %ends, label %done, label %sleep
sleep:
  %slept_before = atomicrmw add ptr %sleepers, i32 1 seq_cst
  call void @sleep_on(ptr %epoch, i32 %seen)
  %slept_after = atomicrmw sub ptr %sleepers, i32 1 seq_cst
  br label %work
done:
  ret i32 0
}

; crew_end(state): let the threads return.
define i32 @__tvm_ffi_crew_end(ptr %self, ptr %arguments, i32 %count, ptr %result) {
  %address = call i64 @argument(ptr %arguments, i32 0)
  %crew = inttoptr i64 %address to ptr
  %ending = getelementptr %Crew, ptr %crew, i32 0, i32 12
  store atomic i32 1, ptr %ending seq_cst, align 4
  %epoch = getelementptr %Crew, ptr %crew, i32 0, i32 0
  %announced = atomicrmw add ptr %epoch, i32 1 seq_cst
  call void @wake(ptr %epoch)
  ret i32 0
}

!llvm.module.flags = !{!0}
!0 = !{i32 4, !"tvm_target", !"$target"}
