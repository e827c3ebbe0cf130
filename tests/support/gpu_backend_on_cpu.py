"""An engine with the attention for GPUs, on a CPU: Triton's kernels are interpreted.

    python -m support.gpu_backend_on_cpu BACKEND EAGER MODEL STORE CONTEXT...

Run in its own process, with TRITON_INTERPRET=1; EAGER 0 traces the model with torch.compile. Prints
a JSON line: an answer to "Why?" for each context, and one to the first context's prompt without a
context, as token ids and log-probabilities. FLASH_ATTN is vLLM's own class with its two CUDA
kernels replaced by loops; TRITON_ATTN is entirely vLLM's own.
"""

import functools
import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "gracekv"}

import torch
import triton
import triton.language as tl
import vllm.triton_utils

# On CPUs, vLLM assumes that Triton is missing and imports a stand-in.
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl


def exchange_flash_kernels():
    """Let vLLM's FlashAttention run without its CUDA kernels."""
    from vllm.v1.attention.backends import flash_attn

    flash_attn.get_flash_attn_version = lambda *_, **__: 2
    flash_attn.flash_attn_supports_quant_query_input = lambda: False
    flash_attn._FA4_DENSE_ATTENTION_KERNEL = paged_attention
    flash_attn.reshape_and_cache_flash = write_pages


def paged_attention(*, q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, block_table, **_):
    """Causal attention over pages k and v [blocks, block, G, d], sequence by sequence."""
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    for row, length in enumerate(lengths):
        new = starts[row + 1] - starts[row]
        if not new:
            continue
        group = q.shape[1] // k.shape[2]
        at = torch.arange(length)
        blocks, slots = block_table[row, at // k.shape[1]].long(), at % k.shape[1]
        keys, values = (x[blocks, slots].repeat_interleave(group, 1) for x in (k, v))
        mine = slice(starts[row], starts[row + 1])
        logits = torch.einsum("nhd,shd->hns", q[mine], keys) * softmax_scale
        hidden = at[None, :] > torch.arange(length - new, length)[:, None]
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        out[mine] = torch.einsum("hns,shd->nhd", weights, values)


def write_pages(key, value, key_cache, value_cache, slot_mapping, *_):
    """Keys and values [tokens, G, d] into the slots of pages [blocks, block, G, d]."""
    size, count = key_cache.shape[1], len(slot_mapping)
    used = slot_mapping >= 0
    blocks, slots = slot_mapping[used] // size, slot_mapping[used] % size
    key_cache[blocks, slots] = key[:count][used]
    value_cache[blocks, slots] = value[:count][used]


def main():
    backend, eager, model, store, *contexts = sys.argv[1:]
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from gracekv.vllm import request
    from gracekv.vllm.serving import GPU
    from support.context_engine import context_engine

    if backend == "FLASH_ATTN":
        exchange_flash_kernels()
    load_general_plugins()
    register_backend(AttentionBackendEnum.CPU_ATTN, GPU[backend])
    most = {"max_model_len": 256, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 40}
    llm = context_engine(model, store, enforce_eager=eager == "1", block_size=16, **most)
    # Asked for by the kernel that writes pages, to choose its tile.
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ask = functools.partial(request, store, question="Why?", tokenizer=tokenizer)
    asked = [ask(name) for name in contexts]
    options = {"max_tokens": 5, "logprobs": 0, "ignore_eos": True}
    prompts = [one.prompt for one in [*asked, asked[0]]]
    params = [one.sampling_params(**options) for one in asked]
    params.append(SamplingParams(temperature=0.0, **options))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    compilation = llm.llm_engine.vllm_config.compilation_config
    (impl,) = {type(layer.impl) for layer in compilation.static_forward_context.values()}
    answers = [output.outputs[0] for output in outputs]
    found = {
        "impl": impl.__name__,
        "mode": compilation.mode.name,
        "answers": [
            [list(one.token_ids), [next(iter(x.values())).logprob for x in one.logprobs]]
            for one in answers
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
