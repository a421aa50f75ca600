# CMake includes this file in the build of llama-cpp-python (CMAKE_PROJECT_INCLUDE).

# The part of llama.cpp that only its own programs use.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)

# GCC 12 removes stores before the instruction ldtilecfg, which reads them. On a CPU with AMX, the prefill of quantised
# weights then ends the process.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-dse>)
endif()
