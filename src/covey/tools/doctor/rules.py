"""Every rule of `covey doctor RUN` under its name, in the order of docs/doctor.md, which is printed from it.

What a rule needs and says stands in table_*.py; how it decides, with its thresholds, in rules_*.py.
"""

from __future__ import annotations

from covey.tools.doctor.evidence import Rule
from covey.tools.doctor.table_length import LENGTH_RULES, MEMORY_RULES
from covey.tools.doctor.table_policy import POLICY
from covey.tools.doctor.table_reward import REWARD
from covey.tools.doctor.table_speed import SPEED

RULES: dict[str, Rule] = {rule.name: rule for rule in (*REWARD, *POLICY, *LENGTH_RULES, *MEMORY_RULES, *SPEED)}
