"""Section `model`."""

from typing import Literal

from contracts.config.section import Count, InputPath, Section

BUNDLED = "bundled"


class ModelConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint to serve."""

    path: InputPath = BUNDLED
    """A Hugging Face folder, a hub id such as Qwen/Qwen3-30B-A3B, with @REVISION for a branch, tag
    or commit, or "bundled" for the model in the package."""
    name: str | None = None
    """Model name in the API. null: the hub id, or the name of the folder."""
    generation_config: Literal["auto", "ignore"] = "auto"
    """Where a request's sampling defaults come from. "auto": generation_config.json of the
    checkpoint. "ignore": temperature 1, no other restriction."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the computation. "auto": that of the checkpoint, but float32 for float16."""
    max_context_tokens: Count | None = None
    """Maximum tokens of a sequence, prompt and answer together. null: the checkpoint's own maximum,
    which is also the upper bound of this setting."""

    def context_tokens(self, checkpoint_tokens: int) -> int:
        """Return the maximum sequence length, given the checkpoint's own maximum."""
        return min(checkpoint_tokens, self.max_context_tokens or checkpoint_tokens)
