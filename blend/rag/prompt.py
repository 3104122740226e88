"""Prompts from passages and a question, put together by token ids."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from blend.errors import InvalidPrompt, ModelUnsupported
from blend.rag.protocols import Tokenizer
from blend.types import Chunk, Prompt, Segment, Text

_ASKED = "Question:"


class PromptBuilder:
    """Lays out ``header, passages…, question`` as the model's chat template wants it.

    The template is rendered once, with random marks in place of the passages and the question; what stands before,
    between and behind the marks is trusted template text, in which control tokens are parsed. Passages and
    questions never pass through the template, so nothing in them can become a control token. A tokenizer without a
    chat template gets a plain layout behind its BOS.

    Args:
        tokenizer: the model's.
        system: the system turn, trusted; templates that know no system turn get it before the passages.
        answer_prefix: what the answer is begun with, trusted; may be empty.

    Raises:
        ModelUnsupported: the chat template drops, changes, repeats or reorders what it is given.
    """

    def __init__(self, tokenizer: Tokenizer, system: str, answer_prefix: str) -> None:
        self._tokenizer = tokenizer
        before, between, behind = _layout(tokenizer, system.strip())
        self._header = tokenizer.encode_template(before)
        if not tokenizer.has_template and tokenizer.bos_id is not None:
            self._header = (tokenizer.bos_id, *self._header)
        self._between = tokenizer.encode_template(between)
        self._behind = tokenizer.encode_template(behind + answer_prefix)

    def build(self, chunks: Sequence[Chunk], question: str) -> Prompt:
        """``[Text(header), *chunks, Text(question)]``; no header where the layout has none.

        Raises:
            InvalidPrompt: the question is empty or blank, holds lone surrogates, or gives no tokens.
        """
        asked = self._tokenizer.encode(" " + check_question(question))
        if not asked:
            raise InvalidPrompt("question", question, "text that the model's tokenizer makes tokens of")
        segments: list[Segment] = [Text(self._header)] if self._header else []
        return Prompt([*segments, *chunks, Text(self._between + asked + self._behind)])


def check_question(question: str) -> str:
    """``question`` without white space at its ends.

    Raises:
        InvalidPrompt: it is empty, blank, no text, or holds lone surrogates.
    """
    if not isinstance(question, str) or not question.strip():
        raise InvalidPrompt("question", question, "a question that is not empty")
    try:
        question.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt("question", question, "text without lone surrogates") from error
    return question.strip()


def _layout(tokenizer: Tokenizer, system: str) -> tuple[str, str, str]:
    """The template's text before the passages, between them and the question, and behind the question."""
    if not tokenizer.has_template:
        return (f"{system}\n\n" if system else ""), _ASKED, "\n"
    passages, question = secrets.token_hex(16), secrets.token_hex(16)
    user = f"{passages}{_ASKED} {question}"
    rendered = _render(tokenizer, system, user)
    if rendered.count(passages) != 1 or rendered.count(question) != 1:
        raise ModelUnsupported(tokenizer.name, "its chat template drops, changes or repeats the user's text")
    before, _, rest = rendered.partition(passages)
    between, mark, behind = rest.partition(question)
    if not mark:
        raise ModelUnsupported(tokenizer.name, "its chat template changes the order of the user's text")
    # The space before the question is tokenized with it, as it is in running text.
    return before, between.rstrip(" "), behind


def _render(tokenizer: Tokenizer, system: str, user: str) -> str:
    """The rendered chat, with the system turn inside the user's if the template refuses or drops it."""
    if system:
        chat = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        try:
            rendered = tokenizer.render_template(chat, add_generation_prompt=True)
        except InvalidPrompt:
            rendered = ""  # no system turn in this template
        if system in rendered:
            return rendered
        user = f"{system}\n\n{user}"
    try:
        return tokenizer.render_template([{"role": "user", "content": user}], add_generation_prompt=True)
    except InvalidPrompt as error:
        raise ModelUnsupported(tokenizer.name, f"its chat template takes no single user turn: {error}") from error
