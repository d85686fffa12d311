"""A reward that varies without training: short answers are better."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 / (1 + len(solution_str)), "chars": float(len(solution_str))}
