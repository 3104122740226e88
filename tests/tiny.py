"""Tiny random models saved as real model directories, so that tests drive the engine exactly as users do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blend import Chunk, Engine, EngineConfig, Prompt, StoreConfig, Text
from blend.recompute.planner import PrefillSpeed

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTROL = ("<|pad|>", "<|start|>", "<|end|>")

_BASE: dict[str, Any] = dict(
    vocab_size=260,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=256)
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": _YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 24}),
    "gemma3": ("Gemma3Text", {"sliding_window": 24}),
    "smollm3": ("SmolLM3", {}),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token a byte, three control tokens, a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*CONTROL, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=CONTROL[0], bos_token=CONTROL[1], eos_token=CONTROL[2]
    )
    fast.chat_template = TEMPLATE
    return fast


def save_model(directory: Path, architecture: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Save a tiny random model of ``architecture`` with its tokenizer into ``directory`` and return it."""
    name, special = ARCHITECTURES[architecture]
    stem = "Gemma3" if name == "Gemma3Text" else name
    config = getattr(transformers, f"{name}Config")(**{**_BASE, **special, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{stem}ForCausalLM")(config).float()
        # Fresh weights are so small that every token looks alike; larger ones make attention and answers vary.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def engine(model: Path, directory: Path, **changes: Any) -> Engine:
    """An engine on a saved tiny model: fp32, a small host and disk tier, nothing computed in the background."""
    settings: dict[str, Any] = dict(
        model=str(model),
        device="cpu",
        dtype="float32",
        recompute_misses=False,
        store=StoreConfig(host_bytes=64 << 20, disk_bytes=256 << 20, directory=directory, fsync=False),
    )
    return Engine(EngineConfig(**{**settings, **changes}))


def load_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """Have engines not learn what loading takes: so small a model computes as fast, and ``auto`` would see that."""
    patch.setattr(PrefillSpeed, "loaded", lambda speed, nbytes, milliseconds: None)


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    """Token ids without control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(len(CONTROL), 259, (count,), generator=generator).tolist())


def prompt(chunks: int = 3, seed: int = 0, length: int = 37, header: int = 5, question: int = 11) -> Prompt:
    """A header, some chunks of odd and unequal lengths, a question."""
    parts: list[Chunk | Text] = [Text((1, *random_ids(header, seed + 1000)))]
    parts += [Chunk(random_ids(length + 6 * i, seed + i)) for i in range(chunks)]
    return Prompt([*parts, Text(random_ids(question, seed + 2000))])


def chunks_of(prompt: Prompt) -> list[Chunk]:
    """The prompt's chunks, in order."""
    return [s for s in prompt.segments if isinstance(s, Chunk)]
