"""vLLM's own model as a decoder of rows: the same weights, used on canvases of blend's.

A pass calls the model outside of its compiled graph and without attention metadata, as vLLM's own profiling run does:
no block of the paged cache is then read or written. Forward hooks on the attention layers give each layer's attention
over the canvases instead. So selectors, and the encoding of chunks, work on this model as on the native engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from blend.connector.vllm.ranks import shards
