"""Answers of a batch that are asked for again, between the batch and the LLM:

    BatchRun <-- Validated <-- Restarting <-- LLM.answer_each
                 checks texts    starts an engine that died

rounds.py    what is asked again, among what is asked for the first time
restarts.py  Restarting: nothing is lost with an engine, and one item cannot end the run
validated.py Validated: an answer that breaks a check is asked again with another seed
schemas.py   AnswerSchema: what a schema is given as, and what it does
checks.py    the checks of a run
checker.py   checks texts by a JSON schema, in a process that can be killed
rules.py     checks how texts begin, and their length
"""

VALIDATE_RETRIES = 2  # how often an answer that breaks a check is asked again, by default
