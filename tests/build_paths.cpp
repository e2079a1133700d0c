#include "tests/build_paths.h"

namespace gatefold {

const char* const kSourceFolder = GATEFOLD_SOURCE_DIR;
const char* const kProgramFile = GATEFOLD_PROGRAM;
const char* const kMpirun = GATEFOLD_MPIRUN;

}  // namespace gatefold
