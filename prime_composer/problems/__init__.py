"""Problems: where they come from, how they become prompts, how answers are checked."""

from prime_composer.problems.config import PROBLEMS as PROBLEMS
from prime_composer.problems.config import DataConfig as DataConfig
from prime_composer.problems.config import Problem as Problem
from prime_composer.problems.config import Tokenizer as Tokenizer
from prime_composer.problems.loading import ProblemSet as ProblemSet
from prime_composer.problems.loading import load_problem_set as load_problem_set
from prime_composer.problems.loading import load_problems as load_problems
