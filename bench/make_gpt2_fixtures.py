#!/usr/bin/env python3
"""Small GPT-2 checkpoints with random weights, and what the transformers library computes from them.

    python3 -m venv env && env/bin/pip install torch transformers
    env/bin/python bench/make_gpt2_fixtures.py            # writes crates/gpt2/tests/fixtures/
    env/bin/python bench/make_gpt2_fixtures.py --merges vocab.bpe   # writes crates/gpt2/data/gpt2.merges from OpenAI's file

Each model's folder has, beside what save_pretrained writes:
  expected.json  prompts, the 64 greedy tokens of each, the smallest distance of the best two logits over all steps
  logits.bin     f32, little-endian: for each prompt in order, its length by the vocabulary
All expectations are computed in f32 from the stored weights. Seeds are searched until every step's distance is at least
MARGIN, some hundred times what f32 may be off, and f64 takes the same path.

tokens/ has strings with their tokens by the tokenizers library: strings.json (GPT-2's vocabulary), small.json (the vocabulary
of gelu/), and text.txt with text.ids (16 bits each).

fuzz/seeds/gpt2_folder/ has the files of a model of two features, each after the number of its kind.
"""

import argparse
import json
import random
import shutil
import struct
import tempfile
import unicodedata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRATE = ROOT / "crates" / "gpt2"
SEEDS = ROOT / "fuzz" / "seeds" / "gpt2_folder"
FIXTURES = CRATE / "tests" / "fixtures"
MERGES = CRATE / "data" / "gpt2.merges"
END = "<|endoftext|>"
STEPS = 64
MARGIN = 2e-3

# What varies: the layout on disk (names without prefix, shards, 16 bits), and all that config.json may say.
MODELS = {
    "gelu": dict(sizes=dict(n_layer=2, n_head=2, n_embd=32, vocab_size=320, n_positions=96), bare=True),
    "shards": dict(
        sizes=dict(n_layer=3, n_head=3, n_embd=48, vocab_size=257, n_positions=97, n_inner=112,
                   activation_function="gelu", layer_norm_epsilon=1e-3, tie_word_embeddings=False),
        shard="120KB",
    ),
    "bf16": dict(
        sizes=dict(n_layer=2, n_head=4, n_embd=32, vocab_size=320, n_positions=96, activation_function="silu"),
        dtype="bfloat16",
    ),
    "f16": dict(
        sizes=dict(n_layer=1, n_head=5, n_embd=35, vocab_size=259, n_positions=96, activation_function="relu",
                   scale_attn_weights=False),
        dtype="float16",
    ),
}

SENTENCES = """Hello, world! It's 2024, and we'll see what they've done; I'm sure you'd say it isn't GPT-2's fault.
The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX'S DEN: DON'T, CAN'T, WON'T.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Größe, Maß, naïve façade, coöperate.
Portez ce vieux whisky au juge blond qui fume. L'été, c'était déjà fini, n'est-ce pas ? « Oui ! »
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío. ¿Qué? ¡Nada!
Съешь же ещё этих мягких французских булок, да выпей чаю. Ґанок, їжак, љубав.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ελλάδα 1821, τέλος.
いろはにほへと ちりぬるを。カタカナ、ひらがな、漢字。半角ｶﾅ、全角ＡＢＣ１２３。
天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。中文分词测试，二〇二四年。
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 각
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق ٠١٢٣٤
דג סקרן שט בים מאוכזב ולפתע מצא חברה. שָׁלוֹם
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले विष्णुवतार। १२३
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ๑๒๓
Tiếng Việt: Do bạch kim rất quý nên sẽ dùng để lắp vô xương. Ấ ậ ợ
😀😃👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪🇯🇵❤️‍🔥 emoji✨and text🎉 1️⃣ ☃︎ ☃️
∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), ½ + ¼ = ¾, x² + y³, Ⅳ Ⅷ ①②③ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚
def f(x):\n    return x**2 + 3*x - 1  # tabs\tand\t\tspaces\n\n\nclass A(object):\n        pass
{"key": [1, 2.5e-10, -3], "s": "a\\u00e9\\n"}   <html><b class='x'>&amp;</b></html>  // TODO: fix!!!
https://example.org/a/b?c=d&e=f#g  user.name+tag@example.com  C:\\Users\\me  ~/.config  192.168.0.1
1 12 123 1234 12345 123456 1234567890 3.14159 1,000,000 0xDEADBEEF 1e-5 2024-01-31T23:59:59Z
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!!!!!!!!!!!!!! ................ ---------------- ________
'tis 'twas o'clock rock'n'roll ''s '''re ' s 's' I'LL WE'RE 'S 'T it’s don’t
   leading, trailing   and   inner    spaces     \t \n  \r\n mixed \u00a0nbsp\u2003em\u3000wide\u200bzero\ufeffbom   """.split("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merges", type=Path, help="OpenAI's vocab.bpe, to make the built-in tokenizer's data from")
    arguments = parser.parse_args()
    if arguments.merges:
        write_merges(arguments.merges)
        return
    shutil.rmtree(FIXTURES, ignore_errors=True)
    FIXTURES.mkdir(parents=True)
    small = tokens()
    for name, model in MODELS.items():
        checkpoint(name, **model)
    small.save(str(FIXTURES / "gelu" / "tokenizer.json"), pretty=False)
    small.model.save(str(FIXTURES / "bf16"))
    seeds(small)
    size = sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file())
    print(f"{size / 1e6:.2f} MB of fixtures")


def alphabet():
    """The characters of the 256 bytes, and the bytes in the order of their tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return characters, printable + hidden


def write_merges(path):
    characters, order = alphabet()
    ids = {characters[byte]: n for n, byte in enumerate(order)}
    lines = path.read_text(encoding="utf-8").split("\n")
    with MERGES.open("wb") as out:
        for line in lines[1:]:
            if line:
                left, right = line.split(" ")
                out.write(struct.pack("<HH", ids[left], ids[right]))
                ids[left + right] = len(ids)


def gpt2():
    """The library's tokenizer with GPT-2's vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    characters, order = alphabet()
    words = [characters[byte] for byte in order]
    merges = []
    for left, right in struct.iter_unpack("<HH", MERGES.read_bytes()):
        merges.append((words[left], words[right]))
        words.append(words[left] + words[right])
    vocabulary = {word: n for n, word in enumerate(words + [END])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def strings():
    """Sentences of many scripts, their pieces, and random strings of every kind of character."""
    source = random.Random(2)
    known = [chr(code) for code in range(0x20000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    kinds = {}
    for character in known:
        kinds.setdefault(unicodedata.category(character)[0], []).append(character)
    spaces = [" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u2028", "\u0085", "\u3000", "\u200b", "\x1c", "\x00"]
    words = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "’s", "the", "Hello", "123", "!!", END, "<|endof", "é", "e\u0301"]
    out = SENTENCES + ["\n".join(SENTENCES)]
    out += ["", " ", "  ", "\n", "\n\n", " \n", "\t", END, END + END, f" {END} ", f"a{END}b", "\x00", "\x7f", "\ufffd", "a" * 300]
    out += [chr(code) for code in range(256)] + [" " + chr(code) for code in range(128)]
    for sentence in SENTENCES:
        for _ in range(20):
            begin = source.randrange(max(1, len(sentence)))
            out.append(sentence[begin : begin + source.randrange(1, 24)])
    for _ in range(1800):
        parts = []
        for _ in range(source.randrange(1, 8)):
            choice = source.random()
            if choice < 0.25:
                parts.append(source.choice(spaces))
            elif choice < 0.45:
                parts.append(source.choice(words))
            elif choice < 0.6:
                parts.append("".join(chr(source.randrange(128)) for _ in range(source.randrange(1, 5))))
            else:
                kind = kinds[source.choice(sorted(kinds))]
                parts.append("".join(source.choice(kind) for _ in range(source.randrange(1, 4))))
        out.append("".join(parts))
    return out


def tokens():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = FIXTURES / "tokens"
    folder.mkdir()
    texts, large = strings(), gpt2()
    write_json(folder / "strings.json", [[text, large.encode(text).ids] for text in texts])
    text = "\n".join(texts) + "\n\n" + " ".join(SENTENCES)
    (folder / "text.txt").write_bytes(text.encode())
    ids = large.encode(text).ids
    (folder / "text.ids").write_bytes(struct.pack(f"<{len(ids)}H", *ids))

    small = Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    small.train_from_iterator(SENTENCES, trainer)
    write_json(folder / "small.json", [[text, small.encode(text).ids] for text in texts[::8]])
    print(f"{len(texts)} strings, {len(ids)} tokens of text")
    return small


def checkpoint(name, sizes, dtype="float32", shard="50GB", bare=False):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    folder = FIXTURES / name
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.3,
                        bos_token_id=None, eos_token_id=None)
    for seed in range(1000):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    parameter.copy_(0.1 * torch.randn_like(parameter))
                elif ".ln_" in key:
                    parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            model = model.to(getattr(torch, dtype))
            stored = {key: value.clone() for key, value in model.state_dict().items()}
            model = model.float()
            prompts = [torch.randint(0, config.vocab_size, (length,)).tolist() for length in (1, 7, 32)]
            paths = [greedy(model, prompt) for prompt in prompts]
            margin = min(margin for _, margin in paths)
            if margin < MARGIN:
                continue
            exact = [path(model.double(), prompt)[0] for prompt in prompts]
            model = model.float()
            if exact == [tokens for tokens, _ in paths]:
                break
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    model = model.to(getattr(torch, dtype))
    assert all(torch.equal(value, stored[key]) for key, value in model.state_dict().items())
    (model.transformer if bare else model).save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "logits.bin").write_bytes(b"".join(part.float().numpy().astype("<f4").tobytes() for part in logits))
    cases = [{"prompt": prompt, "greedy": tokens} for prompt, (tokens, _) in zip(prompts, paths)]
    write_json(folder / "expected.json", {"seed": seed, "margin": margin, "cases": cases})
    print(f"{name}: seed {seed}, margin {margin:.4f}")


def seeds(tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=2, vocab_size=320, n_positions=3))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        tokenizer.model.save(name)
        # One shard, under another name.
        keys = [key for key in model.state_dict() if key != "lm_head.weight"]
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": {key: "shard.safetensors" for key in keys}})
        kinds = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "vocab.json", "merges.txt"]
        shutil.rmtree(SEEDS, ignore_errors=True)
        SEEDS.mkdir(parents=True)
        for kind, file in enumerate(kinds):
            (SEEDS / file).write_bytes(bytes([kind]) + (folder / file).read_bytes())


def greedy(model, prompt):
    """The library's own greedy tokens, the same with and without its cache, and the smallest margin."""
    import torch

    for use_cache in (True, False):
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                             max_new_tokens=STEPS, use_cache=use_cache, pad_token_id=0)
        tokens, margin = path(model, prompt)
        if out[0, len(prompt) :].tolist() != tokens:
            return tokens, 0.0
    return tokens, margin


def path(model, prompt):
    """Greedy tokens and the smallest margin, from whole sequences."""
    import torch

    ids, margin = list(prompt), float("inf")
    for _ in range(STEPS):
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        ids.append(best.indices[0].item())
    return ids[len(prompt) :], margin


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
