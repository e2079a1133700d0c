#include "launch/program.h"
#include "launch/revision.h"

int main(int argc, char** argv) { return gatefold::run_program(argc, argv, {}, GATEFOLD_REVISION); }
