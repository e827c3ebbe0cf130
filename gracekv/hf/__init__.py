"""transformers integration: the cache class, the attention function, compression of prompts.

Importing this package registers the task "gracekv-text-generation" and the attention
implementations "gracekv" and "gracekv_eager" with transformers; `import gracekv` alone does not.
Raises `MissingDependencyError` if transformers is not installed. `compress` is
`gracekv.compress`.
"""

from gracekv.errors import required

if required("transformers", "hf"):
    from gracekv.hf.attention import attach as attach
    from gracekv.hf.attention import detach as detach
    from gracekv.hf.cache import GraceCache as GraceCache
    from gracekv.hf.result import BatchResult as BatchResult
    from gracekv.hf.result import CompressionResult as CompressionResult
    from gracekv.hf.text_generation import GraceTextGeneration as GraceTextGeneration
    from gracekv.hf.text_generation import register

    register()
