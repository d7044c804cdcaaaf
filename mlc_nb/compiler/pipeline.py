"""From a module to the two files of a library bundle: passes, code generation, serialisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tvm
from tvm import relax

from mlc_nb.weights.plan import MAX_STEP_TOKENS

if TYPE_CHECKING:
    from pathlib import Path

    from tvm.relax.frontend import nn
    from tvm.relax.frontend.nn import spec

    from mlc_nb.compiler.kernels.cpu.isa import IsaLevel

__all__ = ["build_library", "pass_context", "target_of"]


def target_of(level: IsaLevel) -> tvm.target.Target:
    """LLVM target of an ISA level."""
    options: dict[str, object] = {"kind": "llvm", "mtriple": level.triple, "mcpu": level.cpu}
    if level.features:
        options["mattr"] = level.features.split(",")
    return tvm.target.Target(options)


def pass_context() -> tvm.transform.PassContext:
    """The settings of TVM's passes under which kernels are compiled."""
    # This pass looks for unused parts of buffers. Our kernels have none, and it takes a quarter of the time.
    return tvm.transform.PassContext(opt_level=2, disabled_pass=["s_tir.CompactBufferAllocation"])


def build_library(
    model: nn.Module, forward_spec: dict[str, spec.Tensor], level: IsaLevel, executable: Path, objects: Path
) -> None:
    """Compile ``model.forward`` as function ``forward`` whose last argument is the tuple of parameters.

    Parameters
    ----------
    model, forward_spec
        The module and the arguments of its `forward`.
    level
        The ISA level to generate code for.
    executable, objects
        Files to write: the VM executable (``.ro``) and the object file with the kernels (``.o``).

    Raises
    ------
    OSError
        If the executable cannot be written whole.
    """
    signature = {**forward_spec, "$": {"param_mode": "packed", "effect_mode": "none"}}
    module, _ = model.export_tvm(spec={"forward": signature})
    # Buffers between kernels are planned once for the largest step, so that no step allocates by its own shape.
    bounds = {"tokens": MAX_STEP_TOKENS, "rows": MAX_STEP_TOKENS}
    module["forward"] = module["forward"].with_attr("tir_var_upper_bound", bounds)
    target = target_of(level)
    with pass_context():
        built = tvm.compile(module, target=target, relax_pipeline=_relax_passes(target))
    built.mod.write_to_file(str(executable), "ro")
    (kernels,) = (imported for imported in built.mod.imports if imported.kind == "llvm")
    kernels.write_to_file(str(objects), "o")
    # TVM does not notice a disk that fills up while it writes; LLVM, which wrote the objects, does.
    try:
        tvm.get_global_func("ffi.Module.load_from_file.relax.VMExecutable")(str(executable))
    except Exception as error:
        raise OSError(f"{executable} was not written whole; is the disk full?") from error


def _relax_passes(target: tvm.target.Target) -> tvm.transform.Pass:
    """Lowering of the graph; our kernels come scheduled, so that nothing is fused or tuned here."""
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]

    def run(module: tvm.ir.IRModule, _context: tvm.transform.PassContext) -> tvm.ir.IRModule:
        with target:
            return tvm.transform.Sequential(passes)(module)

    return tvm.transform.module_pass(run, opt_level=0)
