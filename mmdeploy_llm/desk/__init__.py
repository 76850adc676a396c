"""Carries prompts from callers to engines, and outputs back.

drive.py          feeds one engine in this process and yields its outputs
fleet.py          feeds several engines, each in its own process (data parallelism)
belonging.py      keeps an LLM in the process that made it
jobs.py           what goes to an engine, and what comes back
counting.py       counts tokens without an engine
fleet_engine.py   runs in such a process: reads prompts, drives the engine, sends outputs
"""
