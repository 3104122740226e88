"""Text to token ids and back. Untrusted text never becomes a control token; template text may hold them.

A tokenizer's *control tokens* are its added tokens (``<|im_end|>``, ``<think>`` and so on), special or not, for
a chat template may give any of them a meaning. Two kinds are spared: runs of white space, which some vocabularies
keep among the added tokens, and the token for unknown characters, unless it also begins or ends a text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blend.errors import InvalidInput, InvalidPrompt, ModelCorrupt, ModelNotFound, ModelUnsupported

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A model's fast tokenizer, with one door for untrusted text and another for trusted templates.

    Args:
        inner: a tokenizer of transformers that is backed by the ``tokenizers`` library.
        name: the model's name, for error messages.
        eos_ids: ids that end a generation besides the tokenizer's own EOS.

    Raises:
        ModelUnsupported: ``inner`` has no such backend.
    """

    def __init__(self, inner: PreTrainedTokenizerBase, *, name: str = "", eos_ids: Iterable[int] = ()) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise ModelUnsupported(name, f"{type(inner).__name__} is not a fast tokenizer (tokenizer.json)")
        self.name = name
        self._inner = inner
        spec = json.loads(backend.to_str())
        spec["truncation"] = spec["padding"] = None
        self._template = Backend.from_str(json.dumps(spec))
        self._bos_id = _optional_id(inner.bos_token_id)
        own_eos = _optional_id(inner.eos_token_id)
        self._eos_ids = frozenset(eos_ids) | (frozenset() if own_eos is None else {own_eos})
        self._control = _control_ids(spec, spared=_unknown_id(spec["model"]), never_spared=self._boundary_ids())
        self._text = Backend.from_str(json.dumps(_without(spec, self._control)))

    @classmethod
    def from_directory(cls, directory: Path, name: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model directory; the EOS ids of its configuration files are added.

        Raises:
            ModelNotFound: the directory has no tokenizer that transformers can load.
            ModelCorrupt: a configuration file is not JSON, or holds what no model has.
            ModelUnsupported: the tokenizer needs code of its own, or is not a fast one.
        """
        name = str(directory) if name is None else name
        try:
            inner = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except json.JSONDecodeError as error:
            raise ModelCorrupt(name, f"a tokenizer file in {directory} is not JSON: {error}") from error
        except (ArithmeticError, StrictDataclassError) as error:
            raise ModelCorrupt(name, f"the configuration in {directory} cannot be used: {error}") from error
        except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
            raise ModelNotFound(name, f"{directory} holds no tokenizer that can be loaded: {error}") from error
        return cls(inner, name=name, eos_ids=_configured_eos(directory, name))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of untrusted ``text``. No token is added, and none of the result is a control token.

        Characters that the vocabulary cannot express become whatever its model makes of them: nothing, or the
        unknown token.

        Raises:
            InvalidInput: the text holds lone surrogates, or characters that only a control token stands for.
        """
        ids = self._ids(self._text, text)
        if not self._control.isdisjoint(ids):
            bad = next(t for t in ids if t in self._control)
            raise InvalidInput("text", self._template.id_to_token(bad), "text that needs no control token")
        return ids

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Token ids of trusted template ``text``: special tokens are parsed, none is added."""
        return self._ids(self._template, text)

    @staticmethod
    def _ids(backend: Backend, text: str) -> tuple[int, ...]:
        if not isinstance(text, str):
            raise InvalidInput("text", text, "a str")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInput("text", text[error.start : error.end], "text without lone surrogates") from error
        return tuple(backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ``token_ids``; special tokens are left out."""
        return str(self._template.decode(list(token_ids), skip_special_tokens=True))

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """The text of each of ``token_ids``, special tokens as they are written: for people to look at.

        Where several tokens make one character, the last one has it and the others are empty; what is no character in
        the end is U+FFFD. Joined, the pieces of text without special tokens are the text that :meth:`decode` gives.
        """
        stream = self.detokenizer()
        pieces: list[str] = []
        for token_id in token_ids:
            if token_id not in self._special:
                pieces.append(stream.push(token_id))
                continue
            if pieces:
                pieces[-1] += stream.flush()  # no character goes on behind a special token
            pieces.append(str(self._template.id_to_token(token_id)))
        if pieces:
            pieces[-1] += stream.flush()
        return pieces

    def detokenizer(self) -> Detokenizer:
        """A new :class:`Detokenizer` for one stream of tokens."""
        return Detokenizer(self)

    def render_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The chat template's text for ``messages`` (``role`` and ``content`` each).

        Raises:
            ModelUnsupported: the tokenizer has no chat template.
            InvalidPrompt: the template refuses these messages.
        """
        if not self.has_template:
            raise ModelUnsupported(self.name, "its tokenizer has no chat template")
        try:
            return str(
                self._inner.apply_chat_template(
                    [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except (TemplateError, ValueError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise InvalidPrompt("messages", roles, f"what the chat template takes ({error})") from error

    def bos_or_template_start(self) -> int | None:
        """The BOS id; without one, the first token id of the chat template's rendering; else ``None``."""
        if self._bos_id is not None:
            return self._bos_id
        if not self.has_template:
            return None
        rendered = self.encode_template(self.render_template([{"role": "user", "content": "a"}]))
        return rendered[0] if rendered else None

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._inner.chat_template)

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that :meth:`encode` never yields."""
        return self._control

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that :meth:`decode` leaves out."""
        return self._special

    @property
    def bos_id(self) -> int | None:
        """The id of the begin-of-text token, if there is one."""
        return self._bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation: the tokenizer's and the model's."""
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._template.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(i for i, token in self._template.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def digest(self) -> str:
        """Hex digest (blake2b, 32 bytes) of everything that decides on token ids, the chat template included."""
        template = json.dumps(self._inner.chat_template, sort_keys=True)
        digest = hashlib.blake2b(digest_size=32)
        for part in (self._template.to_str(), template, repr(self._bos_id), repr(sorted(self._eos_ids))):
            data = part.encode("utf-8")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def _boundary_ids(self) -> frozenset[int]:
        return self._eos_ids | (frozenset() if self._bos_id is None else {self._bos_id})


class Detokenizer:
    """Turns one stream of token ids into pieces of text that never end inside a character.

    The pieces and the last :meth:`flush` joined are the text of all ids. A token is decoded together with the
    ones just before it, because decoders of some vocabularies drop a leading space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that it completes, which may be empty."""
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        return self._take(final=False)

    def flush(self) -> str:
        """Return what is held back at the end of the stream: an unfinished character, as U+FFFD."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]


def _optional_id(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _control_ids(spec: Mapping[str, Any], spared: int | None, never_spared: frozenset[int]) -> frozenset[int]:
    """Ids of the added tokens of a tokenizer.json that text must not yield."""
    added = {t["id"] for t in spec["added_tokens"] if t["special"] or t["content"].strip()}
    if spared is not None and spared not in never_spared:
        added.discard(spared)
    return frozenset(added)


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    if model["type"] == "Unigram":
        return _optional_id(model["unk_id"])
    return _optional_id(model["vocab"].get(model.get("unk_token")))


def _without(spec: Mapping[str, Any], control: frozenset[int]) -> dict[str, Any]:
    """A tokenizer.json whose added tokens and model cannot produce the ids of ``control``.

    Dropping the added tokens is not enough: their strings may be pieces of the vocabulary as well, which merges,
    or a look-up of whole words, would reach.
    """
    model = dict(spec["model"])
    if model["type"] == "Unigram":
        # Ids are places in this list, so a piece is not removed but made unlikely and given a name that text
        # does not hold; encode() checks the result all the same.
        lowest = min(score for _, score in model["vocab"]) - 1e4
        model["vocab"] = [
            [f"\x00\x1f{i}\x00", lowest] if i in control and i != model["unk_id"] else entry
            for i, entry in enumerate(model["vocab"])
        ]
    else:
        dropped = {piece for piece, i in model["vocab"].items() if i in control}
        # The unknown token stays: a model without it fails on the first character that it does not know.
        unknown = model.get("unk_token")
        model["vocab"] = {p: i for p, i in model["vocab"].items() if p not in dropped or p == unknown}
        if "merges" in model:
            model["merges"] = [[a, b] for a, b in model["merges"] if dropped.isdisjoint((a, b, _merged(a, b, model)))]
    kept = [token for token in spec["added_tokens"] if token["id"] not in control and not token["content"].strip()]
    return {**spec, "added_tokens": kept, "post_processor": None, "model": model}


def _merged(left: str, right: str, model: Mapping[str, Any]) -> str:
    prefix = model.get("continuing_subword_prefix") or ""
    return left + right.removeprefix(prefix)


def _configured_eos(directory: Path, name: str) -> frozenset[int]:
    """EOS ids of generation_config.json and config.json."""
    found: set[int] = set()
    for file in (directory / "generation_config.json", directory / "config.json"):
        if not file.is_file():
            continue
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelCorrupt(name, f"{file} is not a JSON object: {error}") from error
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return frozenset(found)
