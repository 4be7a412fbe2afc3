"""What runs inside the sandbox: a package of its own that imports only the standard library, never Covey.

Two processes: the judge, which reads the tests, and the candidate, forked before they are read, which runs the model's
program. The candidate never holds the tests or the nonce that marks a verdict, and cannot open the judge (which is not
dumpable). The tests' code runs in the judge; functions under test are remote calls whose results come back by value, as
plain data. So no value brings its own idea of equality, and nothing a program does to its interpreter (exit, patched
builtins, printed markers) reaches the verdict.
"""
