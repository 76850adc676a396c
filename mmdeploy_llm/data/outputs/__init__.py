"""Outputs of a batch: what a run writes to, resumes from and reports.

    own_formats.py lists the formats of the core; plugins add others by the same hook, with what
    public.py has: tars, .npy files and Lance datasets are those of a plugin of this package

    opening/choose.py --> JsonlSink   one file of lines                  jsonl.py
                      |-> StoreSink   what a RecordStore writes          opening/stored.py
                      '-> PartsSink   complete parts, and one that grows part*.py
                            lines.py    parts of lines; the journal of Parquet parts
                            parquet.py  Parquet parts

Complete parts are in a folder, or at a URL of fsspec: data/records/shelves.py. The media that stand
beside the answers come from data/records/media.py.

A part is complete or absent. The records since the last part are in a file that grows, which is on
this machine also when the parts are not, and which a killed run leaves with all its records:

    part-00000  part-00001  .open-00002 --full--> part-00002, then .open-00002 is removed
"""
