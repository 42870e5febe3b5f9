"""How transformers' `generate` and this model agree on the cache, whatever the release calls it."""

from typing import Any

from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from models.hf.cache import KVMDistCache

# The argument that carries a cache: renamed within transformers 5, and a model that takes the other name only
# would generate wrong text without an error.
CACHE_KEY = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"

_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


class CachedGeneration:
    """Greedy, sampling and beam search; modes that take tokens back again are refused."""

    _is_stateful = True

    def _get_deprecated_gen_repo(self, generation_mode: GenerationMode, *rest: Any, **named: Any) -> None:
        """Called by `generate` with its way of decoding, before it does anything."""
        if generation_mode not in _MODES:
            raise ValueError(
                f"decoding by {generation_mode.value} takes tokens back, which a cache of merged tokens "
                "cannot; decode greedily, by sampling or by beams, without an assistant"
            )

    def prepare_inputs_for_generation(self, *arguments: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by `generate` before every forward, with the tokenizer that reads `stop_strings` too.

        By the name of `kwargs` it tells that forward decides which arguments there are.
        """
        kwargs.pop("tokenizer", None)
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*arguments, **kwargs)  # type: ignore[misc]
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> None:
        """Called by `generate`: a new cache, unless one is given or none is wanted."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported: every "
                "kind of layer keeps a cache of its own; leave it out"
            )
        given = require_cache(model_kwargs.get(CACHE_KEY))
        if given is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE_KEY] = KVMDistCache()


def require_cache(cache: Any, older_name: Any = None) -> KVMDistCache | None:
    """The cache that came under one of its two names, or None; it has to be of the kind that layers fill."""
    if cache is not None and older_name not in (None, cache):
        raise ValueError("got cache and past_key_values, which are two names of one thing; pass one of them")
    cache = older_name if cache is None else cache
    if cache is None or isinstance(cache, KVMDistCache):
        return cache
    raise ValueError(
        f"got a cache of type {type(cache).__name__}, wanted KVMDistCache; pass the one that the model "
        "returned, models.hf.KVMDistCache(), or none"
    )
