"""`export`: a Bayesian model as a file that runs without bayesify: draws of the network and their average."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.errors import BayesifyError
from bayesify.files.predictive_module import Draws, Inputs, Named, PredictiveModule, call_network
from bayesify.prediction.likelihood import Categorical, Likelihood, likelihood_of
from bayesify.prediction.predict import predict
from bayesify.prediction.samples import methods_of, number_of_draws

if TYPE_CHECKING:  # importing it takes as long as torch itself
    from torch.export import ExportedProgram as Program

FORMATS = (".aoti.pt2", ".pt2", ".onnx")
TOLERANCE = 1e-4
"""How far an output may be from `predict`, relative to the largest of all outputs."""
Run = Callable[..., Sequence[Any]]
"""A file that was loaded: its inputs to its outputs."""


def export(
    model: nn.Module,
    path: str | Path,
    example: Any,
    *,
    samples: int | None = None,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    draws: Literal["frozen", "inside"] = "frozen",
    prepare: Callable[[Any], Any] | None = None,
    finish: Callable[[Named], Named] | None = None,
) -> None:
    """Write the predictive distribution from S draws as a file that takes any batch size and needs no bayesify.

    >>> import bayesify as by, tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.pt2"
    >>> model = by.convert(nn.Linear(4, 3), by.BatchEnsemble(4))
    >>> by.export(model, file, torch.randn(2, 4))
    >>> log_probs, entropy, epistemic = torch.export.load(file).module()(torch.randn(7, 4))
    >>> log_probs.shape, epistemic.shape
    (torch.Size([7, 3]), torch.Size([7]))

    The outputs depend on the likelihood, and have these names in ONNX files. `Categorical`: log_probs, entropy,
    epistemic; `Bernoulli`: log_probs, log_not_probs, entropy, epistemic; `Gaussian`: mean, std, epistemic_std,
    aleatoric_std. They are those of `predict` with the same samples, seed and likelihood: the file is run on the
    example, and on another number of rows, and compared before it gets its name. (An ONNX file is if onnxruntime is
    installed.)

    Args:
        model: A converted network.
        path: The file: `.pt2` for `torch.export.load`, `.onnx`, or `.aoti.pt2` for code that torch compiles for this
            machine, which needs a C++ compiler here, and `torch._inductor.aoti_load_package` there.
        example: An input batch: a tensor, a tuple of positional inputs, or a dict of keyword arguments.
        samples: The number of draws, as in `predict`.
        seed: The seed of frozen draws.
        likelihood: What outputs mean, `by.Categorical()` by default; `by.Categorical(class_dim=1)` for segmentation.
        draws: "frozen" writes the S draws of the seed, as many networks that share what no draw changes; "inside"
            writes the posterior, and the file itself draws new noise at each call. That needs a method with noise.
        prepare: A function of the inputs, such as a normalisation, that becomes part of the file.
        finish: A function of the dict of outputs that returns one, such as a conversion of units; part of the file too.

    Raises:
        BayesifyError: The network can't be traced, or the file does not give what `predict` gives.
    """
    path = Path(path)
    suffix = next((each for each in FORMATS if path.name.endswith(each)), None)
    if suffix is None:
        raise BayesifyError(
            f"export to {path.name!r}: expected a name that ends in .pt2 or .onnx, or in .aoti.pt2 for compiled code"
        )
    if not path.parent.is_dir():
        raise BayesifyError(f"{path}: the folder {str(path.parent)!r} does not exist")
    if draws not in ("frozen", "inside"):
        raise BayesifyError(f"export(draws={draws!r}): expected 'frozen' or 'inside'")
    likelihood = likelihood_of(likelihood)
    count = number_of_draws(methods_of(model), samples)
    drawn = DrawnNetwork(model)
    inputs = Inputs.of(drawn.network, example, drawn.batch_dim, prepare)
    parts = Draws(model, count, seed if draws == "frozen" else None)
    module = PredictiveModule(parts, likelihood, inputs, prepare, finish).eval()
    expected = _expected(model, module, count, seed)
    with torch.no_grad():
        module.predictive(inputs.batch())  # which also makes the masks that the graph has as constants
    taken = set(inputs.named) & set(module.outputs)
    if taken:
        raise BayesifyError(f"export: the input {min(taken)!r} has the name of an output: rename it")
    program = _program(module)
    about = {"inputs": list(inputs.named), "outputs": list(module.outputs), "samples": count, "draws": draws}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        part = Path(folder) / path.name
        run = WRITERS[suffix](program, module, part, about if draws == "inside" else about | {"seed": seed})
        if run is not None:
            _compare(run, expected, path, exactly=draws == "frozen")
            del run
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == part):  # the file itself comes last
            os.replace(file, path.parent / file.name)


def _expected(model: nn.Module, module: PredictiveModule, samples: int, seed: int) -> list[tuple[Inputs, Named]]:
    """What `predict` gives for the example, for one row of it, and for one row more."""

    def call(network: nn.Module, batch: Any) -> Tensor:
        output = call_network(network, module.prepare(batch) if module.prepare else batch)
        dim = module.likelihood.class_dim if isinstance(module.likelihood, Categorical) else None
        if dim is not None and (not -output.dim() <= dim < output.dim() or output.shape[dim] < 2):
            raise BayesifyError(
                f"export with a Categorical likelihood: expected logits of 2 or more classes, not "
                f"{tuple(output.shape)}; use likelihood=by.Gaussian() or by.Bernoulli(), or class_dim"
            )
        return output

    found = []
    for rows in dict.fromkeys((module.inputs.rows, 1, module.inputs.rows + 1)):
        inputs = module.inputs.with_rows(rows)
        p = predict(model, [inputs.batch()], samples, seed=seed, likelihood=module.likelihood, draws=False, call=call)
        found.append((inputs, module.finished(p)))
    return found


def _compare(run: Run, expected: list[tuple[Inputs, Named]], path: Path, *, exactly: bool) -> None:
    """Raise unless a file gives what `predict` gives; new draws of a file have the same shapes, and are finite too."""
    for inputs, named in expected:
        args, kwargs = inputs.arguments()
        with torch.no_grad():
            found = run(*args, **kwargs)
        finite = [float(value[value.isfinite()].abs().max()) for value in named.values() if value.isfinite().any()]
        atol = TOLERANCE * max(finite, default=0.0)
        for (name, right), value in zip(named.items(), found, strict=True):
            right, value = right.detach().cpu(), torch.as_tensor(value).detach().cpu()
            is_same, far = value.shape == right.shape, math.nan
            if is_same:
                far = float((value - right).abs().max())
                is_close = torch.allclose(value, right, rtol=10 * TOLERANCE, atol=atol, equal_nan=True)
                is_same = is_close if exactly else torch.equal(value.isnan(), right.isnan())
            if not is_same:
                raise BayesifyError(
                    f"{path}: not written, as its {name} of shape {tuple(value.shape)} for {inputs.rows} rows is not "
                    f"that of predict, {tuple(right.shape)} (largest difference {far:.2g}). Does the network read "
                    "values of its inputs in Python, or keep something between calls?"
                )


def _program(module: PredictiveModule) -> Program:
    args, kwargs = module.inputs.arguments()
    try:
        with torch.no_grad():
            program: Program = torch.export.export(module, args, kwargs, dynamic_shapes=module.inputs.dynamic_shapes())
            program = program.run_decompositions({})  # which drops what no output needs
            return program
    except BayesifyError:
        raise
    except Exception as error:  # torch.export has many; each means that the network can't be traced
        raise BayesifyError(
            "export: torch.export can't trace the network for any number of rows. Fixed batch sizes and Python code "
            f"that depends on values of tensors are the usual reasons. Its error: {error}"
        ) from error


def _write_pt2(program: Program, module: PredictiveModule, path: Path, about: Mapping[str, Any]) -> Run:
    torch.export.save(program, path, extra_files={"bayesify.json": json.dumps(about)})
    return torch.export.load(path).module()


def _write_onnx(program: Program, module: PredictiveModule, path: Path, about: Mapping[str, Any]) -> Run | None:
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise BayesifyError("export to .onnx needs the packages of bayesify[export]") from error
    args, kwargs = module.inputs.arguments()
    logger = logging.getLogger("torch.onnx")  # which warns of packages that the network does not need
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        written = torch.onnx.export(program, args, kwargs=kwargs, dynamo=True, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        raise BayesifyError(f"export: torch can't convert the network to ONNX; use a .pt2 file. {error}") from error
    finally:
        logger.setLevel(level)
    assert written is not None
    graph: Any = written.model.graph
    for value in (value for node in graph for value in node.outputs):
        if value.name in module.outputs:  # as `mean` may be inside the graph
            value.name = f"{value.name}.inner"
    for value, name in zip(graph.outputs, module.outputs, strict=True):
        value.name = name
    written.model.metadata_props["bayesify"] = json.dumps(about)
    written.save(path)
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]  # without inputs that the network does not read

    def run(*args: Any, **kwargs: Any) -> Sequence[Any]:
        values = dict(zip(module.inputs.named, args, strict=False)) | kwargs
        given = {name: values[name].detach().cpu().numpy() for name in names}
        return session.run(list(module.outputs), given)  # type: ignore[no-any-return]

    return run


def _write_compiled(program: Program, module: PredictiveModule, path: Path, about: Mapping[str, Any]) -> Run:
    import torch._inductor as inductor  # the only interface that torch has for this
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        inductor.aoti_compile_and_package(program, package_path=str(path))
    except InvalidCxxCompiler as error:
        raise BayesifyError(
            "export to .aoti.pt2 compiles C++ code, and there is no compiler: install g++ or clang, or set the "
            "environment variable CXX; a .pt2 or .onnx file needs none"
        ) from error
    return inductor.aoti_load_package(str(path))


WRITERS: dict[str, Callable[[Program, PredictiveModule, Path, Mapping[str, Any]], Run | None]] = {
    ".pt2": _write_pt2,
    ".onnx": _write_onnx,
    ".aoti.pt2": _write_compiled,
}
