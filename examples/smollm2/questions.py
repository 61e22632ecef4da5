"""Write questions of a family of reasoning-gym as rows of tasks.path:

python -m examples.smollm2.questions products '{"min_terms": 2, "max_terms": 2, "min_digits": 1, \
"max_digits": 2}' > models/products.jsonl
"""

from __future__ import annotations

import json
import sys


def main(family: str, options: str = "{}", number: str = "520") -> None:
    import reasoning_gym  # pip install reasoning-gym==0.1.25: other versions ask other questions

    made = reasoning_gym.create_dataset(family, seed=0, size=int(number), **json.loads(options))
    for entry in made:
        print(json.dumps({"question": entry["question"], "answer": entry["answer"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
