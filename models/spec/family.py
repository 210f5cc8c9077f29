"""Description of a model family: tensor names, rules, and values that config.json does not state.

Names are templates over `{layer}` and `{expert}`; of several names, the first that the checkpoint
holds is used.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Names = tuple[str, ...]


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of an expert's matrices, stored one by one or fused.

    One by one: gate and up [F, D], down [D, F]. Fused: gate_up [E, 2F, D] (gate rows first), down
    [E, D, F]; both transposed if `transposed`. `gate` None: always fused.
    """

    gate: str | None = None
    up: str = ""
    down: str = ""
    fused_gate_up: Names = ("model.layers.{layer}.mlp.experts.gate_up_proj",)
    fused_down: Names = ("model.layers.{layer}.mlp.experts.down_proj",)
    transposed: bool = False


SUPPORTED_ROPE = ("default", "linear", "dynamic", "llama3", "yarn")
RecurrentKind = Literal["", "by_key_head", "separate", "by_row"]
QkNorm = Literal["", "head", "projection", "turned_head", "plain_head"]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A model family.

    Attention. `qk_norm`: norm of queries and keys: of each head before rope, of the whole
    projection, of each head after rope, or of each head without a weight; only if the boolean field
    `qk_norm_key` is true. `bias_key`: field of biases, of which `has_output_bias` excludes that of
    the last product. `gates_attention`: a sigmoid gate of its output. `interleaved_rope`: the pairs
    that rope rotates are side by side. `rotary_fraction`: default of the part of a head that rope
    rotates; None: all of it. `windows`: which layers have one: `all` (if the field
    `window_switch_key` is true), `none`, `later` (from max_window_layers on), `periodic` (by
    default all but each one at a multiple of `window_period`), `sixths` (so with 6, and not the
    first), or `chunks` (Llama 4's, which see only their own chunk). `default_window`: its default.
    `ropes_windows_only`: other layers have no rope. `windows_differ`: layers with a window have
    twice the KV heads, sinks, and a rope of their own. `default_value_dim`: default of the size of
    values if that is not a key's; `value_scale`: field of a factor of values, and its default.

    States. `recurrent`: the family has gated delta net layers, and no windows; how they store their
    projections, or `by_row`: Kimi's delta attention. `has_rope`: False: no layer has it.
    `gates_queries`: gates of attention's output are stored with the queries. `centred_norms`:
    weights of norms are stored as their difference from 1. `indexer`: latent attention is sparse;
    where the indexer's pairs are that rope rotates.

    Feed-forward. `experts` None: only the clamped format exists (layout.clamped_expert_tensors).
    `dense`: which layers have no experts: `none`, `first` (number in `first_moe_key`), or by other
    fields. `mlp`: names of a dense layer's MLP. `shared`: place of the shared experts' MLP, or of
    its gate_up and down; `shared_key`: number of experts that it is as large as, `shared_size_key`:
    its size. `shared_gate`: weight of a sigmoid gate of its output.

    Router. `routing`: the rule; all but `softmax` are RoutingSpec's. `weighs_input`: an expert's
    input, not its output, is multiplied by the weight. `float32_router`: it computes in float32.
    `rounds_topk_weights`: routing weights pass through the model dtype, as in `transformers`.

    Others. `multipliers`: Granite's four factors count. `embedding_switch_key`: embeddings are
    multiplied by the root of their size if the field is true. `layer_norm`: norms are LayerNorms.
    `sandwich_norm`: outputs of attention and MLP are normed too. `required`: fields of which one
    value is supported. `ignored`: names, as regular expressions, of tensors that the logits do not
    need; `has_prediction_layers`: nor those of layers past num_hidden_layers. `with_vision`: name
    of the model of which this is the text model. `aliases`: the family's own names of fields, each
    with the usual one.
    """

    model_type: str
    architecture: str
    num_experts_keys: Names
    expert_ffn_key: str
    dense_ffn_key: str = "intermediate_size"
    router: Names
    experts: ExpertNames | None = None
    qk_norm: QkNorm = ""
    qk_norm_key: str | None = None
    default_qk_norm: bool = True
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    always_norm_topk: bool = False
    default_norm_topk: bool = True
    rounds_topk_weights: bool = False
    mlp: Names = ("mlp",)
    dense: Literal["none", "qwen", "first", "types", "range", "step"] = "none"
    bias_key: str | None = None
    has_output_bias: bool = True
    clip_key: str | None = None
    gates_attention: bool = False
    gates_queries: bool = False
    recurrent: RecurrentKind = ""
    interleaved_rope: bool = False
    has_rope: bool = True
    rotary_fraction: float | None = None
    rotary_dim_key: str | None = None
    rope_alpha: bool = False
    rope_kinds: Names = SUPPORTED_ROPE
    windows: Literal["all", "none", "later", "periodic", "chunks", "sixths"] = "all"
    window_switch_key: str | None = None
    window_period: tuple[str, int] = ("", 0)
    default_window: int | None = None
    ropes_windows_only: bool = False
    windows_differ: bool = False
    default_value_dim: int = 0
    value_scale: tuple[str, float] | None = None
    default_rope_theta: float = 10_000.0
    default_rms_norm_eps: float = 1e-6
    top_k_keys: Names = ("num_experts_per_tok",)
    default_top_k: int | None = None
    default_kv_heads: int = 0
    default_head_dim: int | None = None
    default_tied: bool = False
    head_bias_key: str | None = None
    attention: Literal["grouped", "latent"] = "grouped"
    default_q_rank: int = 1536
    routing: Literal["softmax", "deepseek_v2", "deepseek_v3", "scored", "sparsemixer"] = "softmax"
    score: Literal["softmax", "sigmoid"] = "sigmoid"
    weighs_input: bool = False
    float32_router: bool = False
    correction_bias: Names = ()
    correction_is_matrix: bool = False
    scale_key: str | None = None
    default_routed_scale: float = 1.0
    default_groups: tuple[int | None, int | None] = (None, None)
    first_moe_key: str | None = None
    default_first_moe: int = 0
    shared: Names = ()
    shared_key: str | None = None
    shared_size_key: str | None = None
    default_shared: int = 0
    may_lack_shared: bool = False
    shared_gate: str | None = None
    router_bias: str | None = None
    sinks: bool = False
    sink_names: Names = ("sinks",)
    norm_rounds_once: bool = False
    default_attention_bias: bool = False
    needs_rope_parameters: bool = False
    multipliers: bool = False
    embedding_switch_key: str | None = None
    layer_norm: bool = False
    centred_norms: bool = False
    indexer: Literal["", "halves", "interleaved"] = ""
    default_index_heads: int = 64
    sandwich_norm: bool = False
    required: tuple[tuple[str, object], ...] = ()
    ignored: Names = ()
    has_prediction_layers: bool = False
    with_vision: str | None = None
    aliases: tuple[tuple[str, str], ...] = ()
