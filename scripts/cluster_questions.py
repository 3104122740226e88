"""Asks questions of the demo corpus through a router, two at once, and says who answered from where.

An answer that an engine's end cuts off is asked for again, as any caller would. Exit status 1: a question was left
without an answer, or an engine that was expected to answer did not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from blend_server.client import Client, ServiceError
from blend_server.proto.blend.v1 import blend_pb2 as pb
from blend_server.proto.blend.v1.blend_pb2_grpc import BlendServiceStub

_TRIES = 5
_AT_ONCE = 2
_PATIENCE = 90.0


def main() -> int:
    """Ask; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="the router's")
    parser.add_argument("--first", type=int, default=0, help="which question of the corpus comes first")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--await", dest="awaited", default="", help="engines that must be current before, by commas")
    parser.add_argument("--served-by", help="an engine that must give at least one of the answers")
    parser.add_argument("--touch", type=Path, help="a file that is made when the first answer has come")
    arguments = parser.parse_args()
    if arguments.awaited:
        _await(arguments.address, set(arguments.awaited.split(",")))
    rows = json.loads(Path("blend/eval/demo/questions.json").read_text(encoding="utf-8"))
    questions = [rows[(arguments.first + place) % len(rows)]["question"] for place in range(arguments.count)]
    served: Counter[str] = Counter()
    lost = 0
    with grpc.insecure_channel(arguments.address) as channel, ThreadPoolExecutor(_AT_ONCE) as pool:
        stub = BlendServiceStub(channel)
        for question, found in zip(questions, pool.map(lambda text: _ask(stub, text), questions), strict=True):
            if found is None:
                lost += 1
                sys.stdout.write(f"  LOST  {question}\n")
                continue
            engine, line = found
            served[engine] += 1
            sys.stdout.write(f"  engine {engine}: {line}  {question}\n")
            sys.stdout.flush()
            if arguments.touch is not None:
                arguments.touch.touch()
    if arguments.served_by is not None and not served[arguments.served_by]:
        sys.stdout.write(f"  engine {arguments.served_by} gave no answer\n")
        return 1
    return 1 if lost else 0


def _ask(stub: BlendServiceStub, question: str) -> tuple[str, str] | None:
    """The engine that answered and how, or nothing."""
    request = pb.AnswerRequest(question=question, k=4, max_new_tokens=12, plan=pb.Plan(method="query"))
    for attempt in range(_TRIES):
        call = stub.Answer(request, timeout=60)
        try:
            *_, last = call
        except grpc.RpcError as error:
            sys.stdout.write(f"  asked again after {error.code().name}: {error.details()}\n")
            time.sleep(0.5 * 2**attempt)
            continue
        report, engine = last.answer.report, dict(call.initial_metadata())["blend-engine"]
        tiers = Counter(chunk.tier if chunk.HasField("tier") else "computed" for chunk in report.chunks)
        sources = ", ".join(f"{count} {tier}" for tier, count in sorted(tiers.items()))
        return engine, f"TTFT {report.timings.first_token_ms:5.0f} ms, chunks: {sources:22}"
    return None


def _await(address: str, names: set[str]) -> None:
    """Wait until these engines serve and hold what they should."""
    end = time.monotonic() + _PATIENCE
    with Client(address) as client:
        while time.monotonic() < end:
            try:
                if {tier.name.split("/")[0] for tier in client.stats().engine.tiers} >= names:
                    return
            except ServiceError as error:
                if error.code != "UNAVAILABLE":
                    raise
            time.sleep(0.2)
    sys.exit(f"engines {', '.join(sorted(names))} are not all there after {_PATIENCE:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
