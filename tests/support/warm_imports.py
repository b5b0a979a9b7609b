"""What a command imports sooner or later: the server of forks (warm_process.py) loads this file, so that no
fork has to.
"""

import gc
import importlib

import torch

from nmt.engines.cpu.backend import load_compiled
from support.rings import amount

for name in (
    "lxml.etree",
    "numpy.ctypeslib",
    "sacrebleu",
    "nmt.api",
    "nmt.commands.train",
    "nmt.commands.translate",
    "nmt.corpus.prepare",
    "nmt.train.run_start",
    "nmt.translate.stream",
    "nmt.engines.cuda.training",
    "nmt.extras.report.page",
    "support.faults",
    "support.forks",
    *amount(
        [], ["nmt.evaluate.evaluation", "nmt.extras.export.export", "ctranslate2", "transformers"]
    ),
):
    importlib.import_module(name)

torch.set_num_threads(1)
load_compiled(torch.float32)  # imports numba, which is to have its types ready
gc.collect()
gc.freeze()  # what is never collected is never copied
