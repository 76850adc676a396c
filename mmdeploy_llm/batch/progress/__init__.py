"""Reports what a run does while it runs, to people and to programs.

batch --events--> ProgressReporter --> EventLog: a file, one JSON object for each event
                         '-----------> stderr: a plain line every 30 seconds, if no terminal
"""
