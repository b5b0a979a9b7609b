"""What a command imports sooner or later: the server of forks (warm_process.py) loads this file, so that no
fork has to.
"""

import gc
import importlib

import torch

from nmt.engines.cpu.backend import load_compiled
from support.rings import amount

USUAL = """
    lxml.etree numpy.ctypeslib sacrebleu nmt.api nmt.commands.prepare nmt.commands.serve nmt.commands.train
    nmt.commands.translate nmt.corpus.prepare nmt.extras.pair_scores.score_stream nmt.train.run_start
    nmt.translate.stream nmt.engines.cuda.training nmt.extras.report.page support.forks
"""
SOAK = f"{USUAL} nmt.evaluate.evaluation nmt.extras.export.export ctranslate2 transformers"
for name in amount(USUAL, SOAK).split():
    importlib.import_module(name)

torch.set_num_threads(1)
load_compiled(torch.float32)  # imports numba, which is to have its types ready
gc.collect()
gc.freeze()  # what is never collected is never copied
