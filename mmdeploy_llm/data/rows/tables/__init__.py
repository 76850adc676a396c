"""Tables: Parquet, Arrow, Lance and datasets of the hub, read in a process that can die.

    TableRows (remote.py)                       child process (serve.py), with a limit of memory
      Place of the next row, wanted lines ----> ParquetTable, ArrowTable, LanceTable, HubTable
      Row and BadItem  <---- JSON and bytes --- Piece: some rows, checked and converted to Python
                             (encoding.py)

The libraries that read tables are large and trust what they read: a damaged file can crash them,
or make them allocate all memory. In a child that costs a row, a batch or a file. Nothing that it
sends is unpickled, and it reads ahead while this process computes.
"""
