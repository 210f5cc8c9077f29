"""llama.cpp beside us: a Qwen3-MoE checkpoint as GGUF, and xllamacpp's server in a child process.

python -m benchmarks.support.llama_cpp MODEL.gguf THREADS STREAMS CONTEXT
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.support.sides import DECODE_STEPS

_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def write_gguf(folder: Path, path: Path, dtype: torch.dtype) -> Path:
    """Write a Qwen3-MoE checkpoint with tied embeddings, and a vocabulary without text."""
    gguf = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<t{n}>" for n in range(config["vocab_size"])])
    writer.add_token_types([1] * config["vocab_size"])
    writer.add_token_merges(["< t"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)

    def add(name: str, weight: Tensor) -> None:
        is_matrix = weight.ndim > 1 and "gate_inp" not in name
        if dtype is torch.bfloat16 and is_matrix:
            bits = weight.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, weight.float().contiguous().numpy())

    weights = _weights(folder)
    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for name, of in _OF_LAYER.items():
            add(f"{theirs}{name}.weight", weights[f"{ours}{of}.weight"])
        for name, of in _OF_EXPERTS.items():
            experts = range(config["num_experts"])
            each = [weights[f"{ours}mlp.experts.{expert}.{of}.weight"] for expert in experts]
            add(f"{theirs}{name}.weight", torch.stack(each))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as opened:  # type: ignore[no-untyped-call]
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


class LlamaCpp:
    """Context manager of a server, with the methods of `sides.Ours`."""

    def __init__(self, path: Path, *, threads: int, streams: int, context: int) -> None:
        numbers = map(str, (threads, streams, context))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.support.llama_cpp", str(path), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        url = next((line for line in lines if line.startswith("http")), "")
        if not url:
            raise RuntimeError("llama.cpp did not start: pip install -e '.[engines]'")
        self._client = httpx.AsyncClient(base_url=url.strip(), timeout=300.0, trust_env=False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    async def prefill(self, rows: Tensor) -> list[int]:
        return await self._all(rows, 1)

    async def classify(self, rows: Tensor) -> list[int]:
        """One row after the other: its cached prefix is that of one slot."""
        return [(await self._one(row, 1, cached=True))[0] for row in rows.tolist()]

    async def decode(self, rows: Tensor) -> list[int]:
        return await self._all(rows, DECODE_STEPS)

    async def _all(self, rows: Tensor, tokens: int) -> list[int]:
        """Return the first token of each row's answer."""
        answers = await asyncio.gather(*(self._one(row, tokens) for row in rows.tolist()))
        if any(len(answer) != tokens for answer in answers):
            raise RuntimeError(f"{sorted(map(len, answers))} tokens were generated, not {tokens}")
        return [answer[0] for answer in answers]

    async def _one(self, row: list[int], tokens: int, *, cached: bool = False) -> list[int]:
        body = {
            "prompt": row,
            "n_predict": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": cached,
            "return_tokens": True,
        }
        reply = await self._client.post("/completion", json=body)
        found: list[int] = reply.raise_for_status().json()["tokens"]
        return found


def _serve(path: str, threads: int, streams: int, context: int) -> None:
    xllamacpp = importlib.import_module("xllamacpp")
    params: Any = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx, params.n_batch = streams, streams * context, 4096
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib, params.verbosity = 0, 0
    server = xllamacpp.Server(params)
    address = server.listening_address
    print(address if address.startswith("http") else f"http://{address}", flush=True)
    sys.stdin.read()  # until the parent ends
    os._exit(0)  # the server's threads do not end


if __name__ == "__main__":
    _serve(sys.argv[1], *map(int, sys.argv[2:5]))
