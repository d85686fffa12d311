"""A reward of two named components, for algorithms that look at each."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    short, digits = 1.0 - min(1.0, len(solution_str) / 12), sum(c.isdigit() for c in solution_str) / 12
    return {"score": short + digits, "short": short, "digits": digits}
