"""Compute a first step's loss in float64, of a teacher with a tokenizer of its own.

usage: reference_apart.py STUDENT TEACHER K REQUESTS.json

Imports nothing of this package. The student's tokens are single bytes, of letters. So its next
token is the next byte of the text, and the teacher's probability of it follows from sums alone:

    N(v) = sum over rows k of the text, of those that begin at this byte or before, of
           (probability of the teacher's tokens from the last such row's begin back to k) *
           (mass of the tokens that begin with the text from k's begin to here, and go on with v)
    Q(v) = N(v) / (sum of N, and the mass of the special tokens where a row begins here)

REQUESTS has the student's requests and answers, and the tokens that the teacher was asked for.
Prints JSON of the sequences whose text the teacher was asked for, in order of its requests:

    asked      whether the teacher read the prompt in its own template, and the text behind it
    tail_kl    reverse KL over the sampled token, the most probable others of K and the tail: means

Inside a token of the teacher some next letters are all that there is. The tail keeps 1e-6 then.
"""

import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MOST = 1 - 1e-6
ASCII = {chr(byte) if 32 < byte < 127 else chr(256 + byte) for byte in range(127)} | {chr(289)}
"""The characters of GPT-2's alphabet that stand for the bytes below 128: 127 is the 34th that is
not printable."""


def distributions(path, sequences):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    with torch.no_grad():
        return [torch.softmax(model(torch.tensor([ids])).logits[0], dim=-1) for ids in sequences]


def marginals(text, pieces, rows, contents, ends):
    """Return, for each letter of a text, the teacher's mass by next letter, and the rest of it.

    Args:
        text: the letters.
        pieces: the teacher's tokens of it.
        rows: the teacher's distributions, the first one before the first piece.
        contents: text of each id of the teacher; None for special ones.
        ends: ids that end its turn.
    """
    begins = [0]
    for piece in pieces:
        begins.append(begins[-1] + len(contents[piece]))
    found = []
    for at in range(len(text)):
        last = max(k for k, begin in enumerate(begins) if begin <= at)
        mass, rest = {}, 0.0
        for k in range(last + 1):
            path = math.prod(float(rows[j][pieces[j]]) for j in range(k, last))
            before = text[begins[k] : at]
            for token, content in enumerate(contents):
                probability = float(rows[k][token])
                if content is not None and content.startswith(before) and content != before:
                    after = content[len(before)]
                    mass[after] = mass.get(after, 0.0) + probability / path
                elif content is None and not before:
                    rest += probability
                    if token in ends:
                        mass["end"] = mass.get("end", 0.0) + probability
                        rest -= probability
        total = sum(mass.values()) + rest
        found.append({after: part / total for after, part in mass.items()})
    return found


def main(student, teacher, k, file):
    requests = json.loads(Path(file).read_text())
    own, other = (AutoTokenizer.from_pretrained(path) for path in (student, teacher))
    decoded = [other.convert_ids_to_tokens(i) for i in range(288)]
    special = set(other.all_special_ids)
    # Texts are of letters, which are themselves in GPT-2's alphabet of bytes.
    contents = [None if token is None or i in special else token for i, token in enumerate(decoded)]
    sampled = {}
    for ids, out in requests["student"]:
        prompt = own.decode(ids)
        question = prompt.split("user\n")[1].split("<|im_end|>")[0]
        messages = [{"role": "user", "content": question}]
        reading = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        read = other.encode(reading, add_special_tokens=False)
        text = own.decode(out)
        pieces = other.encode(text, add_special_tokens=False)
        sampled[json.dumps([*read, *pieces])] = (ids, out, read, pieces, text)
    asked = [json.dumps(ids[:-1]) for ids in requests["teacher"]]
    chosen = [sampled[ids] for ids in dict.fromkeys(asked) if ids in sampled][: requests["batch"]]
    p_all = distributions(student, [ids + out for ids, out, *_ in chosen])
    q_all = distributions(teacher, [read + pieces for _, _, read, pieces, _ in chosen])
    end, tail_kl = own.convert_tokens_to_ids("<|im_end|>"), []
    for (ids, out, read, pieces, text), p, q in zip(chosen, p_all, q_all, strict=True):
        rows = q[len(read) - 1 :]
        found = marginals(text, pieces, rows, contents, {other.eos_token_id})
        divergences = []
        for at, (token, by_letter) in enumerate(zip(out, found, strict=True)):
            # Of "<" more may follow, as the student has tokens like <think>; bytes above 127 begin
            # a character that one byte does not tell.
            known = {
                end if after == "end" else own.convert_tokens_to_ids(after): mass
                for after, mass in by_letter.items()
                if after == "end" or (after in ASCII and after != "<")
            }
            others = sorted((-mass, i) for i, mass in known.items() if i != token)
            support = {token: known[token]} | {i: -mass for mass, i in others[: k - 1]}
            total = sum(support.values())
            if total > MOST:
                support = {i: mass * MOST / total for i, mass in support.items()}
            row = p[len(ids) + at - 1]
            pairs = [(float(row[i]), mass) for i, mass in support.items()]
            pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
            divergences.append(sum(a * math.log(a / b) for a, b in pairs))
        tail_kl.append(sum(divergences) / len(divergences))
    print(json.dumps({"asked": all(ids in sampled for ids in asked), "tail_kl": tail_kl}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
