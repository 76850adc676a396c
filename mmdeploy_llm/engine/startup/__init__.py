"""Starts an engine, as one line of values, each made from those before it.

    EngineConfig                                                      the user's options
      -> ModelFiles    plugins, config.json, tokenizer, template      model_files.py
      -> Machine       CPUs, cards, kernels                           machine.py  (cards.py)
      -> RuntimeConfig every option resolved; can be pickled          options.py
      -> LoadedModel   the model with its weights                     loaded.py
      -> CachePlan     how many KV cache blocks the memory holds      memory.py   (worst_case.py)
      -> Runner        ready to run step plans                        computer.py (warm_up.py)
      -> Assembly      intake, scheduler, delivery, engine            rooms.py

start.py walks this line. With tensor parallelism it gives each rank options of its own (shares.py),
and the rank's process walks from LoadedModel to Runner. With data parallelism each engine's process
walks the whole line with its share of the machine.
"""
