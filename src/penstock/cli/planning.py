"""What `penstock plan` does: builds the model of its configuration, asks the planner, and tells what it found."""

import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import Options, Placement
from penstock.cli import values
from penstock.cli.request import HOMES, Request
from penstock.errors import ConfigError, one_line
from penstock.files import write_whole
from penstock.integrations.arguments import check_names
from penstock.integrations.chunked import check_chunkable, chunk_loss
from penstock.integrations.families import Feature, is_known, why_not_isolated
from penstock.integrations.huggingface import (
    PRESETS,
    ModelSource,
    build_sketch,
    enable_activation_checkpointing,
    find_model,
)
from penstock.integrations.lora import Lora, add_adapters, check_precision, parse_lora
from penstock.integrations.tensor_parallel import divide
from penstock.integrations.ulysses import check_shareable, sequence_parallel
from penstock.integrations.vocabulary import grow_vocabulary, rows_for
from penstock.optim import Lion
from penstock.parallel import cut
from penstock.planner import Machine, Plan, explain, machine_for, parse_rate, plan, simulated_mesh
from penstock.planner.formatting import wrapped

Precision = Literal["fp32", "bf16", "fp16"]

_FILE = "plan.json"
_SEED = 0
# bf16 products without one of these are emulated, many times slower than fp32.
_CPU_BF16 = ("avx512_bf16", "amx_bf16")
_CLASSES: Mapping[str, type[torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
} | {"lion": Lion}
#: What `penstock train` calls an optimizer; those of the others it has no name for.
_IN_TRAIN = {"adamw": (), "lion": ("--rule", "lion")} | {
    name: ("--optim", name) for name in ("sgd", "adagrad", "rmsprop")
}


# The question


@dataclass(frozen=True)
class Question:
    """What is planned, checked before a model is built.

    Attributes:
        request: the options.
        source: where the model comes from.
        machine: what it runs on.
        precision: the compute dtype.
        batch: sequences of a micro-batch, and tokens of each.
        packed: True if several rows are in a sequence.
        vocab_size: rows of the embedding.
        lora: the adapters; `None` trains all of the model.
    """

    request: Request
    source: ModelSource
    machine: Machine
    precision: Precision
    batch: tuple[int, int]
    packed: bool
    vocab_size: int
    lora: Lora | None

    def answer(self) -> Plan:
        """Build the model without values, and have the planner find the best placement, or look at the one given."""
        asked = self.request
        with simulated_mesh(asked.mesh or {}) if _is_divided(asked) else nullcontext() as mesh:
            model, cp = self._model(mesh), _ranks(mesh, "cp")
            sharing = sequence_parallel(model, mesh.get_group("cp")) if mesh is not None and cp > 1 else nullcontext()
            with sharing, values.status() as say:
                found = plan(
                    model,
                    _optimizer(asked, model),
                    _batches(self.batch, packed=self.packed, ranks=cp),
                    machine=self.machine,
                    device_bytes=asked.device_memory,
                    host_bytes=asked.host_memory,
                    folders=asked.folder_names,
                    world_size=asked.gpus * asked.hosts,
                    hosts=asked.hosts,
                    mesh=asked.mesh,
                    placement=_placement(asked, _folders(asked, self.machine)) if asked.is_given else "auto",
                    micro_batches=asked.accumulation,
                    measure=asked.measure,
                    trace=asked.trace,
                    stage=asked.stage,
                    precision=self.precision,
                    max_grad_norm=asked.max_grad_norm or None,
                    overlap=asked.overlap,
                    options=_options(asked),
                    progress=say,
                )
        # The planner says what it adds, and the model may have been told already.
        return replace(found, recompute=found.recompute or asked.recompute == "on")

    def _model(self, mesh: DeviceMesh | None) -> nn.Module:
        """Build the model that is trained, of one rank of a mesh."""
        asked = self.request
        model = build_sketch(self.source)
        if self.vocab_size > self.source.vocab_size:
            grow_vocabulary(model, self.vocab_size)
        if self.lora is not None:
            model = add_adapters(model, self.lora, seed=_SEED)
        is_chunkable = asked.chunked_loss == "on" or is_known(self.source.model_class, Feature.CHUNKED)
        if asked.chunked_loss != "off" and is_chunkable and not _is_divided(asked):
            # Of a head with adapters, for example, the logits are whole unless that is asked for.
            with suppress(ConfigError) if asked.chunked_loss == "auto" else nullcontext():
                chunk_loss(model)
        if mesh is not None:
            _divide(model, mesh)
        if asked.recompute == "on":
            enable_activation_checkpointing(model)
        if asked.recompute == "off":
            made: Any = model
            made.supports_gradient_checkpointing = False  # what the planner asks before it tells a model
        return model


def ask(request: Request) -> Question:
    """Check everything that is asked, before a model is built. A machine may be probed.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    for name, file in (("--out", request.out), ("--trace", request.trace)):
        if file:
            values.check_target(name, file)
    _options(request)
    _optimizer(request, nn.Linear(1, 1))
    _placement(request, ("nvme0",))
    figures = dict(_figure(text) for text in request.what_if or ())
    lora = parse_lora(request.lora, option="--lora") if request.lora else None
    source, batch = _source(request)
    packed = _is_packed(request, source)
    if request.chunked_loss == "on":
        check_chunkable(source.model_class)
    machine = _machine(request, figures)
    precision = precision_on(machine, request.precision)
    if lora is not None:
        check_precision(lora, precision, option="--lora")
    _check_mesh(request)
    on_disk = [name for name in HOMES if "nvme" in getattr(request, name)]
    if on_disk and not _folders(request, machine):
        raise ConfigError(f"--{on_disk[0]} puts state on nvme, and the machine has no folder. Name some: --folders.")
    vocab_size = rows_for(
        source.folder, source.vocab_size, multiple=request.pad_vocab_to, trust_remote_code=source.trust_remote_code
    )
    return Question(request, source, machine, precision, batch, packed, vocab_size, lora)


def precision_on(machine: Machine, wanted: str) -> Precision:
    """Choose the precision asked for; for "auto", bf16 if the machine's devices multiply matrices in it."""
    if wanted != "auto":
        return cast("Precision", wanted)
    if machine.device == "cpu":
        # get_capabilities is newer than the oldest torch that is supported.
        capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)() if machine.probed else {}
        return "bf16" if any(capabilities.get(name, False) for name in _CPU_BF16) else "fp32"
    return "bf16" if machine.has("flops_bfloat16") else "fp32"


def _source(request: Request) -> tuple[ModelSource, tuple[int, int]]:
    """Find the model and the size of a micro-batch; refuse sequences that the model has no positions for."""
    is_preset = request.model in PRESETS
    length = request.batch[1] if request.batch else 2
    source = find_model(
        request.model,
        seq_length=length if is_preset else 2,
        trust_remote_code=request.trust_remote_code,
        needs_weights=False,
    )
    positions = source.max_seq_length
    if request.batch is None:
        return source, (16, 128) if is_preset else (4, min(1024, positions or 1024))
    if positions is not None and length > positions:
        raise ConfigError(
            f"--batch {request.batch[0]}x{length} has longer sequences than the {positions} positions of "
            f"{request.model}. Use shorter ones."
        )
    return source, request.batch


def _is_packed(request: Request, source: ModelSource) -> bool:
    """Return True if rows are packed; refuse that if the model would let them see each other."""
    if request.packing == "off":
        return False
    why = why_not_isolated(source.config, source.model_class)
    if why is not None and request.packing == "on":
        raise ConfigError(f"--packing on: {why}. Use --packing off, which pads.")
    return why is None


def _options(request: Request) -> Options:
    """Read `--options`."""
    given = _assignments("--options", request.options, "tile_bytes=4MiB")
    check_names(given, [field.name for field in fields(Options)], "--options")
    made: dict[str, Any] = {}
    for name, text in given.items():
        try:
            made[name] = values.size(text) if name.endswith("_bytes") else _value(text)
        except typer.BadParameter as error:
            raise ConfigError(f"--options {name}={error.message}") from error
    return Options(**made)


def _optimizer(request: Request, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer, with matrices and vectors in groups of their own, as in a run."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]]
    given = _assignments("--optimizer-args", request.optimizer_args, "eps=1e-6")
    arguments: dict[str, Any] = {name: _value(text) for name, text in given.items()}
    try:
        return _CLASSES[request.optimizer_name]([{"params": group} for group in groups if group], **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--optimizer-args: {request.optimizer_name} does not take them: {one_line(error)}. Mend them."
        ) from error


def _assignments(option: str, texts: list[str] | None, example: str) -> dict[str, str]:
    """Read words `name=value`."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value or name in found:
            raise ConfigError(f"{option} {text[:80]!r}: write each name once with its value, such as {example}.")
        found[name] = value
    return found


def _value(text: str) -> Any:
    """Read a number, true, false, several numbers with commas between them, or a word."""
    try:
        found = json.loads(f"[{text}]", parse_float=values.number, parse_constant=values.number)
    except ValueError:
        return text
    return tuple(found) if len(found) > 1 else found[0]


def _placement(request: Request, folders: tuple[str, ...]) -> Placement:
    """Return the placement that is looked at: what is not named is on the device, and optimizer state on the host."""
    named: dict[str, Any] = {name: value for name in HOMES if (value := getattr(request, name)) != "auto"}
    if named.get("activations") == "off":
        del named["activations"]
    return Placement(**{"optimizer": "cpu"} | named, nvme_path=folders or None)


# The machine


def _figure(text: str) -> tuple[str, float]:
    """Read a figure to change."""
    with _naming("--what-if"):
        return parse_rate(text)


def _machine(request: Request, figures: Mapping[str, float]) -> Machine:
    """Find the machine that is meant, and change what is to be changed."""
    if not request.machine:
        print("penstock: this machine is measured, unless it was before; about a minute", file=sys.stderr)
    machine = machine_for(request.machine or None, () if request.machine else request.folder_names)
    with _naming("--what-if"):
        machine = machine.replace(**figures)
    if request.tbw is not None:
        machine = machine.replace(disk_endurance=request.tbw * 1e12)
    devices = int(machine.value("devices")) if machine.has("devices") else None
    if devices is not None and machine.device != "cpu" and request.gpus > devices:
        raise ConfigError(
            f"--gpus {request.gpus} is more than the {devices} of a host of {machine.name}. Use more --hosts, or "
            f"--what-if devices={request.gpus}."
        )
    if request.folders:
        missing = [name for name in ("disk_read", "disk_write", "disk_free") if not machine.has(name)]
        if missing:
            raise ConfigError(
                f"--folders: the machine {machine.name} has no figure {missing[0]}. Say it with --what-if "
                f"{missing[0]}=..., or use a machine that has disks."
            )
    return machine


def _folders(request: Request, machine: Machine) -> tuple[str, ...]:
    """Return the folders of the nvme tier: as they are named, or as many as the machine has by its figures."""
    if request.folder_names or not (machine.has("folders") and machine.has("disk_free")):
        return request.folder_names
    return tuple(f"nvme{number}" for number in range(int(machine.value("folders"))))


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Name an option in the errors of what is read from it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


# Meshes whose ranks have parts of one model (`tp`), or of one sequence (`cp`): the first one's model and batches


def _check_mesh(request: Request) -> None:
    """Refuse a mesh for which no model of transformers can be made, and what does not go with its parts."""
    mesh = request.mesh or {}
    if mesh.get("ep", 1) > 1:
        raise ConfigError(
            "--mesh has ep, and models are divided by their plans for tp alone. Use tp, or plan() in Python."
        )
    if request.chunked_loss == "on" and _is_divided(request):
        raise ConfigError("--chunked-loss on is for whole parameters and sequences. Leave tp and cp out of --mesh.")
    if request.lora and mesh.get("tp", 1) > 1:
        raise ConfigError("--lora is for whole parameters, which --mesh tp divides. Leave one of them out.")


def _is_divided(request: Request) -> bool:
    """Return True if ranks have parts of a model, or of a sequence."""
    mesh: Mapping[str, int] = request.mesh or {}
    return mesh.get("tp", 1) > 1 or mesh.get("cp", 1) > 1


def _divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave a model the parts of its parameters that one rank has; check that ranks can share its sequences."""
    tp, cp = _ranks(mesh, "tp"), _ranks(mesh, "cp")
    if tp > 1:
        with _naming(f"--mesh tp={tp}"):
            divide(model, mesh["tp"])
    if cp > 1:
        with _naming(f"--mesh cp={cp}"):
            made: Any = model
            if getattr(made.config, "output_router_logits", False):
                raise ConfigError("the model's loss has a part of its router, which is of whole sequences.")
            check_shareable(model, cp)


def _ranks(mesh: DeviceMesh | None, name: str) -> int:
    """Count the ranks along a dimension."""
    return mesh[name].size() if mesh is not None and name in (mesh.mesh_dim_names or ()) else 1


def _batches(size: tuple[int, int], *, packed: bool, ranks: int) -> Callable[[], Mapping[str, Any]]:
    """Return a function that makes a micro-batch as a run arranges it, of one and the same token.

    Arguments:
        size: sequences, and tokens of each.
        packed: True if a sequence has several rows; else the last token of the first one is padding, if there are more.
        ranks: how many share each sequence: the batch is the first one's chunk, with labels that are shifted already.
    """
    count, length = size

    def batch() -> Mapping[str, Any]:
        ids = torch.zeros(count, length, dtype=torch.int64)
        made: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
        if ranks > 1:
            chunk = {name: value for name, value in cut(made, 0, ranks).items() if value is not None}
            made = {**chunk, "labels": chunk["shift_labels"]}
            if packed:  # nothing reads it, and zeros that nothing has read take no memory yet
                made["attention_mask"] = torch.zeros(count, 1, length, length, dtype=torch.bool)
        elif packed:
            made["position_ids"] = (torch.arange(length) % -(-length // 2)).expand(count, length).clone()
        elif count > 1:
            mask = torch.ones_like(ids)
            mask[0, -1] = 0
            made["attention_mask"] = mask
        return {**made, "use_cache": False}

    return batch


# The answer


def about(found: Plan, question: Question) -> str:
    """Write what was found, in lines."""
    request = question.request
    parts = [str(found)]
    if request.what_if:
        parts += wrapped(f"what if: {', '.join(request.what_if)}; not a plan of the machine as it is", 2)
    if request.explain:
        parts.append(explain(found))
    if request.max_step is not None and found.fits:
        met = "met" if is_short_enough(found, request) else "not met"
        parts.append(f"step of at most {request.max_step:g} s: {met}")
    if request.out:
        parts.append(f"written: {request.out}")
    if not found.fits or request.what_if:
        return "\n".join(parts)
    if not _is_of_train(found, request):
        parts.append("run: a script of yours, with prepare(placement='auto', plan=...)")
    else:
        first = "" if _is_found_again(request) else f", planned with --out {_FILE}"
        parts.append(f"run{first}:\n{_continued(command(found, question))}")
    return "\n".join(parts)


def is_short_enough(found: Plan, request: Request) -> bool:
    """Return True if a step takes no longer than it may."""
    return request.max_step is None or found.step_s <= request.max_step


def write(found: Plan, path: Path) -> None:
    """Write a plan's file. One that was there is replaced as a whole, or stays as it was.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, found.to_json())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Use another --out.") from error


def _continued(words: list[str]) -> str:
    """Write a command for a terminal of 80 columns, in lines that a shell puts together again."""
    whole = " ".join(shlex.quote(word).replace(" ", "\xa0") for word in words)
    lines = textwrap.wrap(
        whole, 76, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines).replace("\xa0", " ")


def command(found: Plan, question: Question) -> list[str]:
    """Return the words of the command that trains as the plan says, with the options that it was made for."""
    request, precision = question.request, question.precision
    ranks = request.gpus * request.hosts
    words = ["penstock", "train"]
    if ranks > 1:
        hosts = ["--nnodes", str(request.hosts)] if request.hosts > 1 else []
        words = ["torchrun", *hosts, "--nproc-per-node", str(request.gpus), "-m", *words]
    words += _where(found, request)
    # Of a configuration's file: a run needs the folder, with weights beside it.
    is_file = Path(request.model).is_file()
    words += ["--model", str(question.source.folder) if is_file else request.model]
    words += ["--trust_remote_code"] * request.trust_remote_code
    words += ["--per_device_train_batch_size", str(question.batch[0]), "--max_length", str(question.batch[1])]
    words += ["--gradient_accumulation_steps", str(request.accumulation)] * (request.accumulation > 1)
    words += ["--bf16", "false"] if precision == "fp32" else [f"--{precision}", "true"]
    words += ["--packing"] * question.packed
    words += ["--gradient_checkpointing", "false"] * (not found.recompute)  # which TRL turns on by itself
    if (lora := question.lora) is not None:
        words += ["--use_peft", "--lora_r", str(lora.r), "--lora_alpha", f"{lora.alpha:g}"]
        words += ["--lora_target_modules", *lora.targets] + ["--lora_dropout", f"{lora.dropout:g}"] * (lora.dropout > 0)
        words += ["--base", "int8"] * (lora.base == "int8")
    words += _IN_TRAIN[request.optimizer_name]
    words += ["--max_grad_norm", f"{request.max_grad_norm:g}"] * (request.max_grad_norm != 1)
    words += ["--stage", str(request.stage)] * (request.stage != 3)
    return [*words, *(["--options", *request.options] if request.options else [])]


def _is_of_train(found: Plan, request: Request) -> bool:
    """Return True if `penstock train` can do what the plan says, and has an option for everything that was asked."""
    return (
        not (found.mesh or _is_divided(request))
        and found.overlap != "backward"  # a trainer asks for the norm of all gradients before it steps
        and request.optimizer_name in _IN_TRAIN
        and not request.optimizer_args
        and request.pad_vocab_to == 1
        and request.chunked_loss != "off"
    )


def _is_found_again(request: Request) -> bool:
    """Return True if a run has the placement without the plan's file: it is given, or the run's own plan has it."""
    # A run's own plan would be for all the memory that there is.
    limited = request.device_memory or request.host_memory
    return bool(request.out) or (request.overlap == "auto" and (request.is_given or not limited))


def _where(found: Plan, request: Request) -> list[str]:
    """Name where state lives: by the plan's file, by another search, or by what was given; and the folders."""
    if request.out or not _is_found_again(request):
        words = ["--plan", str(request.out or _FILE)]
    elif request.is_given:
        named = ((name, getattr(request, name)) for name in HOMES)
        words = [word for name, tiers in named if tiers != "auto" for word in (f"--{name}", _tiers(tiers))]
    else:
        words = ["--placement", "auto"]
    if request.folders and request.folder_count is None:
        return words if request.out else [*words, "--nvme_path", *request.folder_names]
    number = len(found.placement.nvme_folders())
    return [*words, "--nvme_path", *(f"DIR{place}" for place in range(1, number + 1))] if number else words


def _tiers(tiers: str | Mapping[str, float]) -> str:
    return tiers if isinstance(tiers, str) else ",".join(f"{tier}={part:g}" for tier, part in tiers.items())
