"""A reward that varies without training: short answers are better. And a curriculum: the half with the longer ones is
repeated."""

import numpy as np


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 / (1 + len(solution_str)), "chars": float(len(solution_str))}


def long_ones(scores):
    return np.ones_like(scores) if np.isnan(scores).all() else 1.0 * (scores <= np.nanmedian(scores))
