"""Answers of a batch that are asked for again, between the batch and the LLM:

    BatchRun <-- Validated <-- Restarting <-- LLM.answer_each
                 checks texts    starts an engine that died
                 by a schema

rounds.py    what is asked again, among what is asked for the first time
restarts.py  Restarting: nothing is lost with an engine, and one item cannot end the run
validated.py Validated: an answer that breaks a JSON schema is asked again with another seed
checker.py   checks texts in a process that can be killed
"""

VALIDATE_RETRIES = 2  # how often an answer that breaks a schema is asked again, by default
