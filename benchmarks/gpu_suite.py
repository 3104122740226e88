"""All that has to be seen on a GPU, in one run of a few minutes: are the kernels right, how fast are they, what for.

    python benchmarks/gpu_suite.py

1. Every check of ``tests/recompute/kernels``, against float64, on the GPU.
2. Every kernel's time against what this GPU reaches in the same run: copy bandwidth, or matrix rate; and attention of
   scattered rows against torch's causal attention at every position.
3. A whole blended prefill of a random model of the shape of Llama 3 8B, at ratio 0.15, against the stock full prefill
   of the same model: stored chunks in host memory, copied, turned and placed, then the selected rows computed.
   Attention, and the writing of fresh keys and values, are the decoder's own.

Ends with failure if a check fails. Prints tables, then one JSON line. Without CUDA it says so and ends.
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

from blend.model.decoder import Decoder
from blend.recompute import passes
from blend.recompute.canvas import Canvas
from blend.recompute.kernels.dispatch import kernels
from blend.recompute.kernels.stored import Stored, Turns

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 512
RATIO = 0.15
MAX_ROWS = 4096


def check(console: Console) -> dict[str, bool]:
    """Run every kernel's checks on the GPU: which pass."""
    environment = {**os.environ, "BLEND_KERNEL_DEVICE": "cuda"}
    environment.pop("TRITON_INTERPRET", None)
    passed = {}
    for kernel in ("assemble", "attend", "commit", "deviation", "mass"):
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
        device = decoder.device
        self.decoder = decoder
        generator = torch.Generator().manual_seed(length)
        self.tokens = torch.randint(decoder.vocab_size, (length,), generator=generator).to(device)
        self.canvas = Canvas(decoder.layers, decoder.kv_heads, length, decoder.head_dim, decoder.dtype, device)
        count = (length - 64) // CHUNK
        shape = (count, decoder.layers, 2, decoder.kv_heads, CHUNK, decoder.head_dim)
        self.host = torch.empty(shape, dtype=decoder.dtype, pin_memory=True)
        self.host.copy_(torch.randn(shape[1:], generator=generator))  # one chunk over and over
        self.staging = torch.empty((count, 1, *shape[2:]), dtype=decoder.dtype, device=device)
        self.stored = Stored(list(self.staging))
        self.slots = torch.arange(count * CHUNK, device=device)
        rotation = decoder.rotations[0]
        assert rotation is not None
        self.turns = Turns.of(rotation, [i * CHUNK for i in range(count)], device)
        chosen = torch.randperm(count * CHUNK, generator=generator)[: int(RATIO * count * CHUNK)].sort().values
        self.rows = torch.cat((chosen, torch.arange(count * CHUNK, length))).to(device)

    def fill(self) -> None:
        """Copy, turn and place every layer of every chunk."""
        version = kernels(self.decoder.device)
        for layer in range(self.decoder.layers):
            self.staging[:, 0].copy_(self.host[:, layer], non_blocking=True)
            version.assemble(self.stored, 0, self.canvas.k[layer], self.canvas.v[layer], self.slots, self.turns)

    def recompute(self) -> None:
        """Compute the selected rows and those of the question."""
        passes.run(self.decoder, self.canvas, self.tokens, self.rows, MAX_ROWS)


@torch.inference_mode()
def prefill(lengths: list[int]) -> list[dict[str, float]]:
    """Milliseconds of full and blended prefill at each length."""
    model = random_model(max(lengths))
    found: list[dict[str, float]] = []
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), device="cuda")
        found.append({"tokens": length, "full_ms": timed(lambda ids=ids: model(ids, logits_to_keep=1)) * 1e3})
    decoder = Decoder(model)
    for row in found:
        request = Request(decoder, int(row["tokens"]))
        row["fill_ms"] = timed(request.fill) * 1e3
        row["recompute_ms"] = timed(request.recompute) * 1e3
        row["speed_up"] = row["full_ms"] / (row["fill_ms"] + row["recompute_ms"])
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
    table = Table("tokens", "full ms", "fill ms", "recompute ms", "times as fast")
    for row in blended:
        table.add_row(*(f"{row[name]:,.1f}" for name in ("tokens", "full_ms", "fill_ms", "recompute_ms", "speed_up")))
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
            }
        )
    )
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
