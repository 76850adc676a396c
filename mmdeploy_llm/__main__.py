"""`python -m mmdeploy_llm` is the program mmdeploy-llm."""

from mmdeploy_llm.cli import main

if __name__ == "__main__":
    main()
