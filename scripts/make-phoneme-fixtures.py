#!/usr/bin/env python3
"""Writes tests/cases.json of the crate sconce-phonemes: what hibari-tts 0.2.1 makes of texts.

Run with: python3 scripts/make-phoneme-fixtures.py FOLDER FILE   (needs onnx and onnxruntime)

FOLDER contains the unpacked package (`FOLDER/hibari`). The British network for unknown words has 8-bit activations in
the package. Here it runs with activations in f32, as in the crate.
"""

import json
import pathlib
import sys
import types

import numpy
import onnx
import onnxruntime

# Both accents read each of them.
SENTENCES = """
The quick brown fox jumps over the lazy dog.
She sold 7 of her 19 apples, 100 pears, and 1,234 plums.
It has 1,000,000 users and 2,345,678,901 rows.
That costs $0.05, $1, $1.50, $12.00, and $1,234.56.
They raised $5 million, £3bn, €2.5 billion and $10k.
He owes £20.30 and €99, or ¥500, or Rs. 1,500 crore.
A 50¢ coin; 1¢ more; USD 25; 30 EUR.
My 1st, 2nd, 3rd, 4th, 11th, 21st, 100th and 1,000th attempts.
Prices rose 5%, then fell 3.75%, and 100% of them returned.
In 1999, 2000, 2005, 1805 and 2024 it rained.
The 1980s and the '90s were loud; in 300 BC less so.
On January 5, 2021 we met; on Mar. 3rd, we parted.
The 4th of July 1776, and 25 December, and the 1 May.
It ran from 2023-11-05 to 12/31/2024, or 31/12/99.
Ready by 5/6, 1/2, 3/4, 2/3 and 7/16 of it.
Meet at 7:30 pm, 12:00, 08:05, 9:00 a.m., and 23:59:01.
The flight left at 6:15AM and landed at 18:00.
It is 20°C outside, -5 °F inside, and 90° to the wall.
Run 5 km, 1 km, 3.5 mi; lift 10 kg or 22 lbs in 30 min.
A 500GB disk, 16 GB of memory, 2.4 GHz, 60 fps, 5 mg.
He drove 60 mph for 2 hrs over 1,200 sq ft.
Dr. Smith and Mrs. Jones met Prof. Lee on St. John St. near Mt. Hood.
Acme Inc. and Foo Ltd. vs. Bar Corp. et al.
See Fig. 3, vol. 2, pp. 10-15, ch. 4, No. 7.
Chapter IV, Part II, World War II, Act III, Type IX.
Henry VIII, Queen Elizabeth II, Louis XIV, Pope Pius XII.
King Henry and part of the class came.
NASA, the FBI, the U.S.A., the U.K., HTML, and a PDF.
IBM's CEO met the NYPD at 10am.
I read it yesterday, and I will read it tomorrow.
They live near the live music.
We record a record every year.
Use it or lose the use of it.
He used to be used to it; the tool was used.
The wind can wind the bow; do not object to the object.
Please present the present to the present king.
A tear fell; do not tear it.
The dove dove into the bass.
Close the door; it is close.
She will lead; lead is heavy.
An hour, a unit, the apple, the pear, to eat, to go.
The end. THE END. A and an; am I?
I am, you're, he's, they'll, we'd, don't, can't, won't, it's.
I'd've said y'all shouldn't've gone, 'cause rock 'n' roll.
The boss's car, the dogs' bowls, James' hat, and Jess's.
"Hello," she said, 'and “goodbye” — or not…'
A well-known, state-of-the-art, twenty-one-year-old mother-in-law.
Re-entry, co-operate, e-mail, X-ray, T-shirt, self-aware.
Zyxwolf Kraznahovich met Qwertina Blorptz in Vlorbia.
Schwarzkopfian flibbertigibbets kerfuffled antidisestablishmentarianistically.
The iPhone, YouTube, GitHub, JavaScript, LaTeX and macOS.
Version 1.2.3, Python3, v2, H2O, B2B, MP3, 4K, COVID-19, A320.
Room 101, Route 66, Boeing 747, flight 1205, area 51.
Call 555-1234 or 800-555-0199 now.
Pages 10-20, 3–5 days, 1990-1995, and 10 - 12.
Write to jane.doe@example.com or see https://www.example.org/a/b?c=d.
Visit example.com, docs.rs, and www.bbc.co.uk today.
Use C++ & C#, not F#; 5 + 3 = 8, a < b > c, ~10 * 2 ^ 3.
AT&T, R&D, Q&A, 50/50, and/or, he/she.
#1 fan, #hashtag, @user, item #42.
Area in m², x³ and ½ cup, 2½, ¼ mile, 10 µm.
Copyright © 2020 Foo™, § 5, 3 × 4 ÷ 2 ± 1 → done.
Naïve café résumé façade Zürich Łódź Ångström.
Привет, καλημέρα, 你好 and שלום.
He said: (see below) [sic] {x} <y> /z/ \\w_x.
WAIT! What?! No... Yes;no:maybe,ok.
Wow!!! Really??? ... -- well -- okay.
walked, wanted, loaded, kicked, begged, running, making, panicking, hitting, cities, boxes, buses.
googled, tweeting, blogs, vlogger's, unfriended, zorbed, zorbing, zorbs.
-5 degrees, +7, −3, 1e5, 0x1F, 007, 0.5, .75, 3.14159, 1.10.
123456789012345678901234567890123456 and 0000.
101st, 1990s', 5'd, 3s, 20ing, 6'2", 5-10%.
I was there in '05 w/ him, w/o her, aka BTW, TBD.
Read [this](/ðˈɪs/) and [the docs](https://example.com) now.
e.g. this, i.e. that, etc. and a.m. or p.m.
Mon. 3 Feb. and Sept. 9th; Sat. or Sun.
It's 3 o'clock; o'er the hills; ma'am; fo'c'sle.
OK, ok, Okay; TV, tv; US, us; IT, it; AM, am; IN, in.
What-you-see-is-what-you-get vs WYSIWYG.
ALL CAPS WORDS ARE SHOUTED, LIKE THIS ONE.
mixedCase camelCaseWord snake_case_word kebab-case-word SCREAMING_CASE
:) :-( ;) <3 ^_^ 😀 👍
10,5 1,23 12,345,67 1.234.567 1..2 5.
$ 5, £, 5$, US$10, $-5, $5-10, $3.999, $1.5 million dollars
Rs 5, ₹1 lakh, ₩1000, 10 ¥
cf. Smith (2010), pp. 3-4; est. 1890.
The 2nd-best 3-year-old's 10th birthday on 5th May.
HP-UX, BytesIO, CharSetProber, SplitResultBytes and GailTreeView.
to TO To; by and by; drop by; the To: field
""".strip().split("\n")

TEXTS = [
    "Hello there. How are you? Fine!",
    "Dr. Smith met J. K. Rowling. They spoke.",
    "He said \"Stop.\" Then he left. (Really.) Yes.",
    "It costs 3.50 e.g. now. and so on. Next.",
    "One line\nAnother line\n\n  A third.  \n \n",
    "Wait... what? No way!! Ok… Fine.",
    "Mr. A. B. Lt. Kim vs. them. ’Tis so.” ‘Quote.’ End",
    "Ask the Dr! Now. Is it X? Yes.",
    "", "   ", "...", "No end", "A.\tB.\tCc. Dd.",
]

# Sentences of more phonemes than the package speaks at once.
LONG = [
    " ".join(f"Part {i} of it is here, and {i} more: so it goes;" for i in range(40)),
    "A short one. " + "word, " * 150 + "end.",
]


def in_f32(path):
    """The network with its 8-bit matrices times their scales, and with products in f32."""
    model = onnx.load(path)
    graph = model.graph
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    maker = {name: each for each in graph.node for name in each.output}
    nodes, known = [], set(arrays) | {each.name for each in graph.input}
    for each in graph.node:
        if each.op_type == "MatMulInteger":
            stem = each.input[1].removesuffix("_quantized")
            matrix = arrays[each.input[1]].astype(numpy.float32) * arrays[stem + "_scale"]
            graph.initializer.append(onnx.numpy_helper.from_array(matrix, stem))
            known.add(stem)
            [cast] = [user for user in graph.node if each.output[0] in user.input]
            [scaled] = [user for user in graph.node if cast.output[0] in user.input]
            source = maker[each.input[0]].input[0]
            nodes.append(onnx.helper.make_node("MatMul", [source, stem], scaled.output))
        else:
            nodes.append(each)
    replaced = {name for each in nodes if each.op_type == "MatMul" for name in each.output}
    nodes = [each for each in nodes if each.op_type != "Mul" or not replaced & set(each.output)]
    del graph.node[:]
    while nodes:
        ready = [each for each in nodes if all(not name or name in known for name in each.input)]
        nodes = [each for each in nodes if each not in ready]
        graph.node.extend(ready)
        known.update(name for each in ready for name in each.output)
        if not ready:
            break
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__.split("\n\n")[1])
    sys.path.insert(0, sys.argv[1])
    from hibari.g2p import G2P
    from hibari.g2p.oov import ASSETS, OOV
    from hibari.tts import Hibari

    british = str(pathlib.Path(ASSETS) / "oov_gb.onnx")
    accents = {"us": G2P(), "gb": G2P(british=True, oov=OOV(british, in_f32(british)))}
    cases = [
        {"accent": accent, "text": text, "phonemes": read(text)}
        for text in SENTENCES for accent, read in accents.items()
    ]
    sentences = [{"text": text, "sentences": Hibari.split_sentences(text)} for text in TEXTS]
    reader = types.SimpleNamespace(split_sentences=Hibari.split_sentences, g2p=accents["us"])
    parts = [{"text": text, "parts": Hibari.phonemize(reader, text)} for text in LONG]
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump({"phonemes": cases, "sentences": sentences, "long": parts}, file, indent=1, ensure_ascii=False)
        file.write("\n")


if __name__ == "__main__":
    main()
