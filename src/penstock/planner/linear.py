"""Small linear programmes: variables that are not negative, rows of them, solved by HiGHS on one thread.

What is asked in bytes has an exact answer: the basis that HiGHS ends with is solved again in fractions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # it is imported where something is solved: whoever takes a plan from a file solves nothing
    import highspy

#: Terms of a sum, by variable. The constant has the name "".
Terms = Mapping[str, float]
CONSTANT = ""
TOLERANCE = 1e-9


def unit_of(terms: Terms) -> float:
    """Give the size of what terms sum to, for a variable that stands for a part of it: values are to be about 1."""
    return max(map(abs, terms.values()), default=0.0) or 1.0


@dataclass(frozen=True)
class Solution:
    """What a linear programme came to.

    Attributes:
        value: the least value of what was minimised.
        values: of each variable.
        prices: of each row, by how much the value changes for each unit that its limit rises.
    """

    value: float
    values: Mapping[str, float]
    prices: Mapping[str, float]

    def of(self, terms: Terms) -> float:
        """Sum up terms."""
        return sum(factor * (self.values[name] if name else 1.0) for name, factor in terms.items())


class _Row:
    """A row, divided by the largest of its terms: bytes and seconds differ by ten powers of ten."""

    def __init__(self, name: str, terms: dict[str, float], lower: float, upper: float) -> None:
        self.name, self.terms, self.lower, self.upper = name, terms, lower, upper
        self.scale = unit_of(terms)


class Linear:
    """A linear programme that is being written.

    Variables are those that rows and costs name. They are at least 0, and should be about 1.
    """

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._rows: list[_Row] = []

    def at_most(self, name: str, terms: Terms, limit: float = 0.0) -> None:
        """Hold that terms sum to at most a limit."""
        self._add(name, terms, -inf, limit)

    def equals(self, name: str, terms: Terms, value: float) -> None:
        """Hold that terms sum to a value."""
        self._add(name, terms, value, value)

    def least(self, costs: Terms) -> Solution | None:
        """Find the least sum of costs; `None` where no values meet all rows."""
        solver = self._solve(costs)
        if solver is None:
            return None
        found = solver.getSolution()
        values = {name: max(0.0, found.col_value[column]) for name, column in self._columns.items()}
        prices = {row.name: float(dual) / row.scale for row, dual in zip(self._rows, found.row_dual, strict=True)}
        value = float(solver.getInfo().objective_function_value) + costs.get(CONSTANT, 0.0)
        return Solution(value, values, prices)

    def exactly(self, costs: Terms) -> dict[str, Fraction] | None:
        """Find the variables at the least sum of costs without rounding; `None` where no values meet all rows.

        What is apart by less than a billionth counts as equal until a basis is found.
        """
        import highspy

        solver = self._solve(costs)
        if solver is None:
            return None
        basis = solver.getBasis()
        basic, upper = highspy.HighsBasisStatus.kBasic, highspy.HighsBasisStatus.kUpper
        names = [name for name, column in self._columns.items() if basis.col_status[column] == basic]
        slack = [number for number in range(len(self._rows)) if basis.row_status[number] == basic]
        equations = []
        for number, row in enumerate(self._rows):
            if number in slack:
                continue  # it holds with room to spare: nothing is to be solved for
            limit = row.upper if basis.row_status[number] == upper or row.lower == -inf else row.lower
            equations.append([*(Fraction(row.terms.get(name, 0)) for name in names), Fraction(limit)])
        solved = dict(zip(names, _eliminate(equations), strict=True))
        return {name: solved.get(name, Fraction(0)) for name in self._columns}

    def _add(self, name: str, terms: Terms, lower: float, upper: float) -> None:
        constant = terms.get(CONSTANT, 0.0)
        variables = {variable: factor for variable, factor in terms.items() if variable and factor}
        for variable in variables:
            self._columns.setdefault(variable, len(self._columns))
        self._rows.append(_Row(name, variables, lower - constant, upper - constant))

    def _solve(self, costs: Terms) -> highspy.Highs | None:
        import highspy

        for variable in costs:
            if variable:
                self._columns.setdefault(variable, len(self._columns))

        class Silent(highspy.Highs):
            """Prints nothing: since HiGHS 1.16 the first call, in the constructor, begins standard output."""

            def enableCallbacks(self) -> None:  # noqa: N802
                self.setOptionValue("output_flag", False)
                super().enableCallbacks()  # type: ignore[no-untyped-call]

        solver = Silent()  # type: ignore[no-untyped-call]
        # One thread and one method: the same programme has the same answer.
        for option, value in (("output_flag", False), ("threads", 1), ("parallel", "off"), ("solver", "simplex")):
            solver.setOptionValue(option, value)
        for option in ("primal_feasibility_tolerance", "dual_feasibility_tolerance"):
            solver.setOptionValue(option, TOLERANCE)
        solver.passModel(self._model(costs))
        solver.run()
        return solver if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal else None

    def _model(self, costs: Terms) -> highspy.HighsLp:
        import highspy

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._columns), len(self._rows)
        model.col_cost_ = np.array([costs.get(name, 0.0) for name in self._columns], dtype=np.double)
        model.col_lower_ = np.zeros(len(self._columns))
        model.col_upper_ = np.full(len(self._columns), inf)
        model.row_lower_ = np.array([row.lower / row.scale for row in self._rows])
        model.row_upper_ = np.array([row.upper / row.scale for row in self._rows])
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = model.num_col_, model.num_row_
        starts, index, value = [0], list[int](), list[float]()
        for row in self._rows:
            scale = row.scale
            index += [self._columns[name] for name in row.terms]
            value += [factor / scale for factor in row.terms.values()]
            starts.append(len(index))
        matrix.start_, matrix.index_ = np.array(starts, dtype=np.int32), np.array(index, dtype=np.int32)
        matrix.value_ = np.array(value, dtype=np.double)
        return model


def _eliminate(equations: list[list[Fraction]]) -> list[Fraction]:
    """Solve as many equations as there are unknowns; each is its factors, and what they sum to."""
    count = len(equations)
    for pivot in range(count):
        at = next(row for row in range(pivot, count) if equations[row][pivot])
        equations[pivot], equations[at] = equations[at], equations[pivot]
        leading = equations[pivot]
        leading[:] = [value / leading[pivot] for value in leading]
        for row in range(count):
            if row != pivot and (factor := equations[row][pivot]):
                equations[row] = [a - factor * b for a, b in zip(equations[row], leading, strict=True)]
    return [equation[-1] for equation in equations]
