"""All that has to be seen on a GPU, in one run of a few minutes: are the kernels right, how fast are they, what for.

    python benchmarks/gpu_suite.py

1. Every check of ``tests/recompute/kernels`` on the GPU: kernels against float64, and whole requests of a tiny random
   model, from the store to the answer, against plain torch and against the CPU.
2. Every kernel's time against what this GPU reaches in the same run: copy bandwidth, or matrix rate; and attention of
   scattered rows against torch's causal attention at every position.
3. A whole blended prefill of a random model of the shape of Llama 3 8B, at ratio 0.15, against the stock full prefill
   of the same model: stored chunks in pinned host memory, copied, turned and placed layer by layer while the selected
   rows are computed, as an engine does it; and each of the two alone, to tell how much of the copying that hides. The
   engine's own full prefill beside it, and the most memory that any of them takes against what is planned for them.

Ends with failure if a check fails, or if more memory is taken than was planned. Prints tables, then one JSON line.
Without CUDA it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels import measure, show
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from blend import versions
from blend.model.decoder import Decoder
from blend.recompute import passes
from blend.recompute.assemble import Assembly, Piece
from blend.recompute.scratch import Scratch, Shapes

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 512
RATIO = 0.15
MAX_ROWS = 4096


def check(console: Console) -> dict[str, bool]:
    """Run the checks of every kernel, and of an engine, on the GPU: which pass."""
    environment = {**os.environ, "BLEND_KERNEL_DEVICE": "cuda"}
    environment.pop("TRITON_INTERPRET", None)
    passed = {}
    for kernel in ("assemble", "attend", "commit", "deviation", "mass", "engine"):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"tests/recompute/kernels/{kernel}.py",
        ]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        passed[kernel] = run.returncode == 0
        console.print(f"{kernel}: {'right' if passed[kernel] else run.stdout[-3000:] + run.stderr[-1000:]}")
    return passed


def random_model(longest: int) -> Any:
    """A model of the shape of Llama 3 8B with random weights, in bfloat16."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=longest,
        rope_theta=500000.0,
    )
    torch.manual_seed(1)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def timed(call: Any, tries: int = 3) -> float:
    """Median seconds of ``call``, which ends when the GPU is done; one more call warms up."""
    times = []
    for _ in range(tries + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])


class Request:
    """One prompt of ``length`` tokens, all of it stored chunks but the last 64."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        self.decoder = decoder
        generator = torch.Generator().manual_seed(length)
        self.tokens = torch.randint(decoder.vocab_size, (length,), generator=generator).to(decoder.device)
        self.canvas = decoder.new_canvas(length)
        count = (length - 64) // CHUNK
        shape = (count, decoder.layers, 2, decoder.kv_heads, CHUNK, decoder.head_dim)
        self.host = torch.empty(shape, dtype=decoder.dtype, pin_memory=True)
        self.host.copy_(torch.randn(shape[1:], generator=generator))  # one chunk over and over
        self.pieces = [Piece(i * CHUNK, CHUNK, 1) for i in range(count)]
        chosen = torch.randperm(count * CHUNK, generator=generator)[: int(RATIO * count * CHUNK)].sort().values
        self.rows = torch.cat((chosen, torch.arange(count * CHUNK, length))).to(decoder.device)

    def blended(self) -> None:
        """Fill the canvas while the selected rows and those of the question are computed."""
        assembly = self._begin_to_fill()
        self.recompute()
        assembly.close()

    def fill(self) -> None:
        """Copy, turn and place every layer of every chunk."""
        assembly = self._begin_to_fill()
        self.canvas.need(self.decoder.layers - 1)
        assembly.close()

    def recompute(self) -> None:
        """Compute the selected rows and those of the question."""
        passes.run(self.decoder, self.canvas, self.tokens, self.rows, MAX_ROWS)

    def full(self) -> None:
        """Compute all rows, as an engine does."""
        passes.everything(self.decoder, self.canvas, self.tokens, MAX_ROWS)

    def _begin_to_fill(self) -> Assembly:
        decoder, host = self.decoder, self.host
        assembly = Assembly(self.canvas, self.pieces, decoder.rotations, decoder.kernels)

        def fill(layer: int) -> None:
            assembly.put(layer, host[:, layer].unbind())
            if layer + 1 < decoder.layers:
                assembly.ahead(layer + 1, host[:, layer + 1].unbind())

        self.canvas.fill_by(fill)
        return assembly


def measured(decoder: Decoder, length: int) -> dict[str, float]:
    """Milliseconds of a prefill's parts and wholes, and MiB of memory that were planned and taken for it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    request = Request(decoder, length)
    calls = {"own_full": request.full, "fill": request.fill, "recompute": request.recompute, "blended": request.blended}
    found = {f"{name}_ms": timed(call) * 1e3 for name, call in calls.items()}
    planned = Scratch(Shapes.of(decoder), MAX_ROWS).need(length).total
    taken = torch.cuda.max_memory_allocated() - before
    return {**found, "planned_mib": planned / 2**20, "taken_mib": taken / 2**20}


@torch.inference_mode()
def prefill(lengths: list[int]) -> list[dict[str, float]]:
    """Full and blended prefill at each length."""
    model = random_model(max(lengths))
    found: list[dict[str, float]] = []
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), device="cuda")
        found.append({"tokens": length, "full_ms": timed(lambda ids=ids: model(ids, logits_to_keep=1)) * 1e3})
    decoder = Decoder(model)
    for row in found:
        row |= measured(decoder, int(row["tokens"]))
        row["speed_up"] = row["full_ms"] / row["blended_ms"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="lengths of the prefill")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing is checked or timed. tests/recompute/test_triton.py needs none.")
        return 0
    console = Console(width=140)
    gpu = torch.cuda.get_device_name()
    console.print(f"{gpu}, torch {torch.__version__}")
    passed = check(console)
    timings = measure()
    show(timings, console)
    blended = prefill(given.tokens)
    passed["memory"] = all(row["taken_mib"] <= row["planned_mib"] for row in blended)
    columns = {
        "tokens": "tokens",
        "full_ms": "stock full ms",
        "own_full_ms": "own full ms",
        "fill_ms": "fill ms",
        "recompute_ms": "recompute ms",
        "blended_ms": "both ms",
        "speed_up": "times as fast",
        "planned_mib": "planned MiB",
        "taken_mib": "taken MiB",
    }
    table = Table(*columns.values())
    for row in blended:
        table.add_row(*(f"{row[name]:,.1f}" for name in columns))
    console.print(table)
    print(
        json.dumps(
            {
                "benchmark": "gpu_suite",
                "gpu": gpu,
                "torch": torch.__version__,
                "right": passed,
                "kernels": [vars(timing) for timing in timings],
                "prefill": blended,
                "environment": versions.as_json(),
            }
        )
    )
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
