"""From a model's structure to a library bundle. Runs in a child process only; the one room that imports TVM's compiler."""
