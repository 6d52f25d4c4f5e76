#!/usr/bin/env python3
"""Makes the tiny Qwen3-shaped model that the workers serve.

Needs `tokenizers` (and torch + safetensors for --weights). Writes config.json,
generation_config.json, tokenizer.json, tokenizer_config.json and
chat_template.jinja into the folder given by --out.

The tokenizer is a byte-level BPE trained on text that every Python has (its
own standard library's sources and licence), so it needs no download. The same
Python version gives the same tokenizer.

Weights: none by default (`vllm serve --load-format dummy`: vLLM makes random
weights with a fixed seed, so all workers answer alike). With --weights a
random model.safetensors (bf16) is written.
"""
import argparse, json, os, pathlib, sysconfig, sys

TEMPLATE = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set ns = namespace(s='') %}
        {%- for part in message.content or [] %}
            {%- if part.type == 'text' %}{%- set ns.s = ns.s + part.text %}{%- endif %}
        {%- endfor %}
        {%- set content = ns.s %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set f = tool_call.function if tool_call.function else tool_call %}
            {{- '\n<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]


def corpus(limit_bytes):
    std = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in std.glob("*.py")) + sorted(std.glob("email/*.py")) + sorted(std.glob("asyncio/*.py"))
    lic = [std / "LICENSE.txt", std.parent.parent / "LICENSE.txt"]
    files = [p for p in lic if p.exists()] + files
    n = 0
    for p in files:
        try:
            t = p.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        n += len(t)
        yield t
        if n > limit_bytes:
            return


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default=str(pathlib.Path(__file__).resolve().parent / "model"))
    ap.add_argument("--vocab", type=int, default=4096)
    ap.add_argument("--hidden", type=int, default=64)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--heads", type=int, default=4)
    ap.add_argument("--kv-heads", type=int, default=2)
    ap.add_argument("--head-dim", type=int, default=32)
    ap.add_argument("--corpus-bytes", type=int, default=4_000_000)
    ap.add_argument("--weights", action="store_true")
    a = ap.parse_args()
    out = pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)

    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    tk = Tokenizer(models.BPE(byte_fallback=False))
    tk.normalizer = normalizers.NFC()
    # Qwen2/Qwen3's pre-tokenizer
    pat = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    tk.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pat), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tk.decoder = decoders.ByteLevel()
    tr = trainers.BpeTrainer(vocab_size=a.vocab - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                             special_tokens=[], show_progress=False)
    tk.train_from_iterator(corpus(a.corpus_bytes), tr)
    tk.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL[:3]])
    tk.add_tokens([AddedToken(s, special=False, normalized=False) for s in SPECIAL[3:]])
    ids = {s: tk.token_to_id(s) for s in SPECIAL}
    vocab = tk.get_vocab_size(with_added_tokens=True)
    tk.save(str(out / "tokenizer.json"), pretty=False)

    j = lambda name, o: (out / name).write_text(json.dumps(o, indent=2) + "\n")
    j("tokenizer_config.json", {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
        "added_tokens_decoder": {str(i): {"content": s, "lstrip": False, "normalized": False, "rstrip": False,
                                          "single_word": False, "special": n < 3}
                                 for n, (s, i) in enumerate(ids.items())},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 32768, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None})
    (out / "chat_template.jinja").write_text(TEMPLATE)
    cfg = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
           "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "head_dim": a.head_dim,
           "hidden_act": "silu", "hidden_size": a.hidden, "initializer_range": 0.02,
           "intermediate_size": a.hidden * 2, "max_position_embeddings": 32768, "max_window_layers": a.layers,
           "model_type": "qwen3", "num_attention_heads": a.heads, "num_hidden_layers": a.layers,
           "num_key_value_heads": a.kv_heads, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
           "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
           "use_sliding_window": False, "vocab_size": vocab}
    j("config.json", cfg)
    j("generation_config.json", {"bos_token_id": ids["<|endoftext|>"], "do_sample": True,
                                 "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
                                 "pad_token_id": ids["<|endoftext|>"]})
    if a.weights:
        import torch
        from safetensors.torch import save_file
        g = torch.Generator().manual_seed(0)
        r = lambda *s: (torch.randn(*s, generator=g) * 0.05).to(torch.bfloat16)
        one = lambda n: torch.ones(n, dtype=torch.bfloat16)
        w = {"model.embed_tokens.weight": r(vocab, a.hidden), "model.norm.weight": one(a.hidden)}
        for i in range(a.layers):
            p = f"model.layers.{i}."
            w.update({p + "input_layernorm.weight": one(a.hidden), p + "post_attention_layernorm.weight": one(a.hidden),
                      p + "self_attn.q_norm.weight": one(a.head_dim), p + "self_attn.k_norm.weight": one(a.head_dim),
                      p + "self_attn.q_proj.weight": r(a.heads * a.head_dim, a.hidden),
                      p + "self_attn.k_proj.weight": r(a.kv_heads * a.head_dim, a.hidden),
                      p + "self_attn.v_proj.weight": r(a.kv_heads * a.head_dim, a.hidden),
                      p + "self_attn.o_proj.weight": r(a.hidden, a.heads * a.head_dim),
                      p + "mlp.gate_proj.weight": r(a.hidden * 2, a.hidden),
                      p + "mlp.up_proj.weight": r(a.hidden * 2, a.hidden),
                      p + "mlp.down_proj.weight": r(a.hidden, a.hidden * 2)})
        save_file(w, str(out / "model.safetensors"), metadata={"format": "pt"})
    print("vocab", vocab, ids)
    for p in sorted(out.iterdir()):
        print(p.stat().st_size, p.name)


main()
