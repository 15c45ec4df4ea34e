#!/usr/bin/env python3
"""Makes the goldens of prompt cleaning and tokenisation in tests/goldens/tokenizer/.

    PYTHON tools/make_tokenizer_goldens.py assets/shapes/tokenizer

PYTHON is an environment with tokenizers, sentencepiece, ftfy and diffusers (tests/goldens/README.md).
The argument is the tokenizer folder of the demo model. Written are

  bytes/tokenizer.json   a tokenizer as current libraries save it: no spiece.model, byte fallback,
                         <extra_id_k>; trained here on invented sentences
  flags.json             keys that replace those of bytes/tokenizer.json: added tokens of every kind,
                         the other normalisers, words that get no mark
  cases.json             for each text: what diffusers' prompt_clean makes of it, and the ids that
                         the tokenizers library gives for the text and for the cleaned text, cut at 512
"""
import io
import json
import pathlib
import random
import sys

import ftfy  # noqa: F401  prompt_clean cleans less without it
import sentencepiece
import tokenizers
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from tokenizers import normalizers, pre_tokenizers, processors

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "goldens" / "tokenizer"
MAX_LENGTH = 512

WAN_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走")

TEXTS = [
    # Ordinary prompts.
    "", "a", "a green triangle moving up on a black background",
    "Two cats box on a spotlighted stage.", "a cat, a dog; and: a bird!", "UPPER lower MiXeD",
    "The quick brown fox jumps over the lazy dog 1234567890", "supercalifragilisticexpialidocious",
    "it's the cat's pyjamas", "3.14159 × 2 = 6.28318", "e-mail: someone@example.com",
    "https://example.com/a?b=c&d=e#f", "C:\\path\\to\\file", "snake_case and kebab-case",
    "\"quoted\" 'single' `back`", "(round) [square] {curly} <angle>", "100% of $5 & €6 = £7",
    # White space.
    " ", "   ", " leading", "trailing ", "  both  ", "two  blanks", "many      blanks",
    "tab\tseparated\twords", "line\nbreak", "crlf\r\nbreak", "cr\rbreak", "form\ffeed",
    "vertical\vtab", "nbsp\u00a0here", "\u00a0", "en\u2002em\u2003thin\u2009hair\u200aspaces",
    "ideographic\u3000space", "line\u2028separator", "para\u2029separator", "ogham\u1680space",
    "narrow\u202fnbsp", "math\u205fspace", "next\u0085line", "file\x1cgroup\x1drecord\x1eunit\x1fend",
    "zero\u200bwidth", "joiner\u200dhere", "nonjoiner\u200chere", "word\u2060joiner", "\ufeffbom first",
    "soft\u00adhyphen", "a \u200b b", "\n\n\nnewlines\n\n\n", "mixed \t\r\n \u00a0\u3000 run",
    # Control characters and terminal escapes.
    "nul\x00inside", "\x00", "bell\x07and\x08backspace", "delete\x7fme", "\x1b[31mred\x1b[0m text",
    "\x1b[1;32;40mbold", "\x1b[unfinished", "\x1b[12", "lone\x1bescape", "interlinear\ufff9a\ufffab\ufffb",
    "object\ufffcreplacement", "ltr\u200emark rtl\u200fmark", "\u202aembed\u202c", "deprecated\u206a\u206f",
    "c1 \x80 \x85 \x91quote\x92 \x9c", "undefined c1 \x81 \x8d \x8f \x90 \x9d", "noncharacter \uffff \ufdd0",
    "replacement \ufffd char", "trailing replacement \ufffd", "\U0001d173 musical",
    # HTML entities.
    "Tom &amp; Jerry", "Tom &amp;amp; Jerry", "Tom &amp;amp;amp;amp; Jerry", "&lt;b&gt;bold&lt;/b&gt;",
    "<b>Tom &amp; Jerry</b>", "<b>Tom &amp;amp;amp; Jerry</b>", "first &amp;amp;amp; line\n<i> second &amp;amp;amp; line",
    "&quot;quoted&quot;", "&#39;numeric&#39;", "&#x27;hex&#x27;", "&#X41;&#65;&#065", "no semicolon &copy 2024",
    "&notanentity;", "&notit; I said", "&not", "&notin;", "&;", "&", "&&amp;&", "&unknown;", "AT&T", "R&D;",
    "&nbsp;&nbsp;indented", "&eacute;&EACUTE;&Eacute;&eACUTE;", "&SZLIG; &szlig;", "&HELLIP;&hellip;",
    "&#0; &#1; &#13; &#128; &#133; &#150; &#129;", "&#xD800; &#x110000; &#99999999999999999999;",
    "&#xFFFE; &#xFDD0; &#11; &#127;", "&#59; &#38;amp; &#38;#38;amp;", "&#12ab; &#xZZ; &# &#x", "&NotEqualTilde; &fjlig;",
    "&CounterClockwiseContourIntegral;", "&CounterClockwiseContourIntegralx;", "&ampamp;", "&lt;3 and &gt;:(",
    "&ltamp;", "&hearts; &#9829; &#x2665;", "a&ltb&gtc", "&Tab;x&NewLine;y", "&#x1F600;", "&ensp;&emsp;x",
    "&lt;extra_id_0&gt;", "&lt;/s&gt;", "&amp;lt;pad&amp;gt;",
    # Quotes, ligatures, widths, compositions.
    "\u201cdouble\u201d \u2018single\u2019 \u201alow\u201b \u201elow\u201f", "\u02bcokina \u2032prime\u2033", "«guillemets» ‹single›",
    "ﬁnd the ﬂuﬃest ﬀ ﬄ ﬅ ﬆ", "Ĳssel ĳs ŉ ǅ ǆ Ǉ ǌ ǲ", "æsthetic œuvre", "ＬＯＵＤ　ＮＯＩＳＥＳ", "ｆｕｌｌ，ｗｉｄｔｈ！",
    "Ｕﾀｰﾝ ﾊﾟﾋﾟ", "￠￡￢￣￤￥￦", "ﾡﾢ ￨￩", "cafe\u0301 vs café", "A\u030a Å Å", "o\u0308\u0304 ȫ", "q\u0307\u0323 q\u0323\u0307",
    "\u1e9b\u0323", "e\u0301\u0301\u0301", "\u0301alone", "x\u0338 =\u0338", "½ ¼ ² ³ ™ ℃ №", "ⅷ Ⅻ ① ㋿ ㌀", "𝒜𝓁𝓅𝒽𝒶 𝔸", "ſ long s", "…ellipsis...", "–—―", "µ μ Ω Ω",
    # Scripts.
    WAN_NEGATIVE, "镜头跟随一只猫", "一個綠色的三角形，向上移動。", "日本語のテキスト、カタカナとひらがな", "한국어 텍스트", "\u1112\u1161\u11ab\u1100\u1173\u11af", "\u3131\u314f", "ภาษาไทยไม่มีช่องว่าง", "กำลังเดินอยู่",
    "مرحبا بالعالم", "السَّلَامُ عَلَيْكُمْ", "ﷺ ﻻ", "שלום עולם", "नमस्ते दुनिया क्षि", "Привет, мир", "Γειά σου Κόσμε", "Tiếng Việt có dấu", "Türkçe İıŞş", "ქართული ᲥᲐᲠᲗᲣᲚᲘ", "አማርኛ", "မြန်မာဘာသာ", "தமிழ்", "ខ្មែរ",
    # Emoji and beyond the basic plane.
    "😀", "a 😀 b", "👩‍👩‍👧‍👦 family", "👍🏽 ok", "🏳️‍🌈 🇩🇪", "1️⃣ #️⃣", "❤ ❤️", "𠀋 𝄞 𐍈",
    # Special tokens and what looks like them.
    "</s>", "<pad>", "<unk>", "<s>", "text </s> text", "text</s>text", "</s></s>", "<pad> <pad>", "</S>", "< /s>", "<extra_id_0>",
    "<extra_id_3>", "b <extra_id_0>", "b<extra_id_1>c", "<extra_id_0> walks in <extra_id_1>, seats", "<extra_id_99>", "<extra_id_00>",
    "<extra_id_3", "＜/s＞", "＜unk＞", "＜extra_id_0＞", "<0x41>", "a<0x0A>b <0xFF> <0x>", "<0X41> <0x4g>", "\u2581", "\u2581a\u2581b", "a \u2581 b", "\u2581\u2581", " \u2581x",
    "[MASK] here", "a [MASK]b", "x[mask]y [mask] z", "wordy word sword word", "NORM norm Ｎorm ＮＯＲＭ", "  [L]  [R]  x[L]y", "［Ｌ］",
    # Long.
    "green " * 600, "a" * 700, "绿" * 600, "supercalifragilistic" * 60, ", ".join(["a small red circle moves left"] * 90),
    "😀" * 150, "<extra_id_2>" * 520, "word " * 510 + "end", "&amp;" * 300,
    # ftfy would take these for mojibake.
    "cafÃ© au lait", "â€œquotedâ€\u009d",
]


def piece_list(sp):
    return [(sp.id_to_piece(i), sp.get_score(i)) for i in range(sp.vocab_size())]


def protobuf_fields(data: bytes):
    """The (field number, value) pairs of one protobuf message; length-delimited values as bytes."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        size = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        if size is None:
            size = varint()
        yield tag >> 3, data[at:at + size]
        at += size


def train() -> dict:
    """bytes/tokenizer.json as an object."""
    rng = random.Random(7)
    nouns = "cat dog fox bird circle triangle square river mountain robot garden lantern 猫 绿色 三角形 背景".split()
    verbs = "walks runs jumps turns moves falls rises dances glows spins 移动 静止".split()
    adjectives = "red green small large bright slow quick quiet wooden silver 模糊 艳丽".split()
    syllables = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s")]
    nouns += ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(400)]
    sentences = [
        f"{rng.choice(['the', 'a', 'one'])} {rng.choice(adjectives)} {rng.choice(nouns)} {rng.choice(verbs)} "
        f"{rng.choice(['over', 'under', 'near', 'behind', 'with'])} the {rng.choice(nouns)}{rng.choice('.,!?')}"
        for _ in range(8000)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, model_type="unigram", vocab_size=700,
        byte_fallback=True, character_coverage=1.0, pad_id=0, eos_id=1, bos_id=2, unk_id=3, num_threads=1,
        minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    normalizer = next(value for field, value in protobuf_fields(model.getvalue()) if field == 3)
    charsmap = next(value for field, value in protobuf_fields(normalizer) if field == 2)

    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.Unigram(piece_list(sp), unk_id=sp.unk_id(), byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([
        normalizers.Precompiled(charsmap),
        normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
    ])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    specials = ["<pad>", "</s>", "<s>", "<unk>"] + [f"<extra_id_{k}>" for k in reversed(range(100))]
    tokenizer.add_special_tokens([tokenizers.AddedToken(s, normalized=False, special=True) for s in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", sp.eos_id())])
    return json.loads(tokenizer.to_str())


def flags(base: dict) -> dict:
    next_id = 1 + max(t["id"] for t in base["added_tokens"])
    added = list(base["added_tokens"])

    def add(content, **flag):
        added.append({"id": next_id + len(added), "content": content, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False, "special": False} | flag)

    next_id -= len(added)
    add("[MASK]", lstrip=True, special=True)
    add("[mask]", lstrip=True, rstrip=True)
    add("word", single_word=True)
    add("NORM", normalized=True)
    add("[L]", lstrip=True, normalized=True)
    add("[R]", rstrip=True, normalized=True)
    return {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFKC"}, {"type": "Strip", "strip_left": False, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"},
            {"type": "Replace", "pattern": {"String": "x"}, "content": "ks"}]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
    }


def main() -> None:
    demo = pathlib.Path(sys.argv[1]) / "tokenizer.json"
    OUT.joinpath("bytes").mkdir(parents=True, exist_ok=True)

    def write(name, value, **layout):
        OUT.joinpath(name).write_text(json.dumps(value, ensure_ascii=False, **layout) + "\n")

    base = train()
    write("bytes/tokenizer.json", base, indent=1)
    patch = flags(base)
    write("flags.json", patch, indent=1)

    by_name = {
        "shapes": tokenizers.Tokenizer.from_file(str(demo)),
        "bytes": tokenizers.Tokenizer.from_str(json.dumps(base)),
        "flags": tokenizers.Tokenizer.from_str(json.dumps(base | patch)),
    }
    cases = []
    for text in dict.fromkeys(TEXTS):
        case = {"text": text, "cleaned": prompt_clean(text)}
        for name, tokenizer in by_name.items():
            tokenizer.no_padding()
            tokenizer.enable_truncation(MAX_LENGTH)
            case[name] = {"raw": tokenizer.encode(text).ids, "clean": tokenizer.encode(case["cleaned"]).ids}
        cases.append(case)
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    OUT.joinpath("cases.json").write_text(f'{{"max_length":{MAX_LENGTH},"cases":[\n{lines}\n]}}\n')
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
