"""The way from callers to engines.

drive.py          feeds one engine in this process and yields its outputs
fleet.py          feeds several engines, each in its own process (data parallelism)
fleet_engine.py   runs in such a process: reads prompts, drives the engine, sends outputs
"""
