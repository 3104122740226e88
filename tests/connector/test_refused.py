"""An engine in which nothing can be blended: requests run at full prefill, or fail where they are strict."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blend import Chunk, Plan, Prompt, Text
from tests import tiny
from tests.connector.conftest import Ask, Vllm, store_settings, vllm
from tests.connector.test_modes import SIZES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """All layers of the model have windows: vLLM gives a request blocks for the last window alone."""
    model = tiny.save_model(tmp_path_factory.mktemp("model"), "mistral-window", **SIZES)
    store = store_settings(tmp_path_factory.mktemp("store"))
    with vllm(model, store, max_model_len=1024, skip_tokenizer_init=True) as made:
        yield made


def test_a_strict_request_fails_and_nothing_waits_for_it(served: Vllm) -> None:
    chunk = Chunk(tiny.random_ids(300, 5))
    prompt = Prompt([Text((1, 7, 8)), chunk, Text(tiny.random_ids(20, 6))])
    plan = Plan("head", ratio=0.15)
    served.forget_prefixes()
    (exact,) = served.ask(Ask(prompt))
    served.forget_prefixes()
    lenient, strict = served.ask(Ask(prompt, plan), Ask(prompt, plan, strict=True))
    assert (lenient.token_ids, lenient.report) == (exact.token_ids, None)
    assert (strict.finish_reason, strict.token_ids) == ("error", ())
    served.forget_prefixes()  # vLLM refuses while a block is in use
