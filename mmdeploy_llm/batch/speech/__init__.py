"""Transcribes files of speech: in windows that overlap, to subtitles and text.

file --> samples --> windows --> answers with times --> joined --> .srt .vtt .txt .json .source
         run.py      run.py      hooks.SpeechRules      joining.py writing.py       sources.py
"""
