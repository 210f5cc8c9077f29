"""llama.cpp beside us: a checkpoint as GGUF, and xllamacpp's server in a child process.

python -m benchmarks.support.llama_cpp MODEL.gguf THREADS STREAMS CONTEXT
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.support.sides import DECODE_STEPS

_OF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "olmoe": "olmoe", "glm4_moe": "glm4moe"}


def write_gguf(folder: Path, path: Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint with tied embeddings, and a vocabulary without text."""
    gguf = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config["model_type"]])
    _add_sizes(writer, config)
    _add_vocabulary(writer, config["vocab_size"])
    weights = _weights(folder)

    def add(name: str, weight: Tensor) -> None:
        is_matrix = weight.ndim > 1 and "gate_inp" not in name
        if dtype is torch.bfloat16 and is_matrix:
            bits = weight.bfloat16().contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, weight.float().contiguous().numpy())

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    if config["model_type"] == "olmoe":  # its graph has a head of its own
        add("output.weight", weights["model.embed_tokens.weight"])
    for layer in range(config["num_hidden_layers"]):
        for name, weight in _layer(weights, f"model.layers.{layer}.", config):
            add(f"blk.{layer}.{name}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
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
    if config["model_type"] == "glm4_moe":
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        kinds = importlib.import_module("gguf").ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID)


def _add_vocabulary(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<t{n}>" for n in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["< t"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _layer(
    weights: dict[str, Tensor], at: str, config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and weight of the tensors that a layer has."""
    for name, of in _OF_LAYER.items():
        if f"{at}{of}" in weights:
            norm = "post_attention_norm.weight" if config["model_type"] == "glm4_moe" else name
            yield norm if name == "ffn_norm.weight" else name, weights[f"{at}{of}"]
    for name, of in _OF_EXPERTS.items():
        experts = [
            f"{at}mlp.experts.{expert}.{of}.weight" for expert in range(config["num_experts"])
        ]
        if experts[0] in weights:
            yield f"{name}.weight", torch.stack([weights[expert] for expert in experts])


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
