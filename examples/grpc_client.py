"""Put a document into a running blend-server and ask about it, with nothing but gRPC.

The same works in any language that gRPC has a compiler for. Make the stubs from the proto file, then run it:

    pip install grpcio grpcio-tools
    python -m grpc_tools.protoc -I server/blend_server/proto/blend/v1 --python_out=. --grpc_python_out=. blend.proto
    PYTHONPATH=. python examples/grpc_client.py 127.0.0.1:50061 notes.md "How high is the harbour light?"
"""

from __future__ import annotations

import sys
from pathlib import Path

import blend_pb2 as pb
import blend_pb2_grpc
import grpc


def main(address: str, file: str, question: str) -> None:
    """Ingest ``file`` under its name, and print the answer as it comes, with what it cost."""
    with grpc.insecure_channel(address) as channel:
        blend = blend_pb2_grpc.BlendServiceStub(channel)
        document = pb.Document(id=file, title=Path(file).stem, content=Path(file).read_bytes())
        for progress in blend.Ingest(iter([document])):
            stage = progress.WhichOneof("stage")
            print(f"{progress.document_id}: {stage}")
            if stage == "failed":
                sys.exit(progress.failed.message)

        plan = pb.Plan(method="query", ratio=0.15)
        for event in blend.Answer(pb.AnswerRequest(question=question, k=3, plan=plan, max_new_tokens=16)):
            kind = event.WhichOneof("event")
            if kind == "passages":
                print("from:", ", ".join(f"{p.document_id} #{p.ordinal}" for p in event.passages.passages))
            elif kind == "token":
                print(event.token.text, end="", flush=True)
            else:
                report = event.answer.report
                print(f"\n{report.timings.first_token_ms:.0f} ms to the first token; {report.mode}:", end=" ")
                print(f"{report.cached} of {report.tokens} tokens from storage, {report.charged_ratio:.1%} recomputed")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
