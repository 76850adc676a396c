"""Carries prompts from callers to engines, and outputs back.

arguments.py      checks the arguments of LLM's methods
jobs.py           makes jobs of prompts and conversations
drive.py          feeds one engine in this process and yields its outputs
fleet.py          feeds several engines, each in its own process (data parallelism)
fleet_engine.py   runs in such a process: reads prompts, drives the engine, sends outputs
merge.py          makes one output of the n completions of a prompt
progress.py       shows the progress bar of generate and chat
"""
