"""CTranslate2 behind FastAPI, as anybody would write it; one of the servers of scripts/bench/serving.py.

PEERS/bin/python scripts/bench/plain_server.py EXPORT PORT INTER_THREADS INTRA_THREADS BEAM ALPHA

EXPORT is what nmt-export --to ctranslate2 wrote. FastAPI runs `translate` in a pool of 40 threads, and
CTranslate2 translates INTER_THREADS requests at a time.
"""

import sys
from typing import Any

import ctranslate2
import sentencepiece
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

folder, port, inter, intra, beam, alpha = sys.argv[1:]
translator = ctranslate2.Translator(
    folder,
    compute_type="float32",
    inter_threads=int(inter),
    intra_threads=int(intra),
)
pieces = sentencepiece.SentencePieceProcessor(f"{folder}/vocab.model")
app = FastAPI()


class Question(BaseModel):
    q: str


@app.post("/translate")
def translate(question: Question) -> dict[str, Any]:
    line = pieces.encode(question.q, out_type=str)
    (found,) = translator.translate_batch(
        [line],
        beam_size=int(beam),
        length_penalty=float(alpha),
        max_decoding_length=len(line) + 50,
    )
    return {"translatedText": pieces.decode(found.hypotheses[0])}


uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
