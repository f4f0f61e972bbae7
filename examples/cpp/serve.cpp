// Loads an AOTInductor package that tdc wrote and runs it on ragged batches, without Python.
//
//     serve model.pt2 < texts        one text a line; prints one line of scores for each
//
// A ragged batch goes in as its flat tensors, in the order that `print(exported.signature())` shows:
//
//     0  tokens.values   int64[N]       the bytes of all texts, one after another
//     1  tokens.offsets  int64[B + 1]   where each text begins, and N
//     2  tokens.extent   uint8[L, 0]    an empty tensor whose shape says how long the longest text is
//
// Bounds are not checked here: a caller from C++ keeps to those of the signature.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: serve model.pt2 < texts\n";
    return 2;
  }
  std::vector<int64_t> values, offsets{0};
  int64_t longest = 0;
  for (std::string line; std::getline(std::cin, line);) {
    for (unsigned char byte : line) {
      values.push_back(byte);
    }
    offsets.push_back(static_cast<int64_t>(values.size()));
    longest = std::max(longest, static_cast<int64_t>(line.size()));
  }

  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  const std::vector<at::Tensor> inputs{
      at::tensor(values, at::kLong), at::tensor(offsets, at::kLong), at::empty({longest, 0}, at::kByte)};
  const at::Tensor scores = package.run(inputs).at(0).contiguous();  // (B, classes)

  for (int64_t row = 0; row < scores.size(0); ++row) {
    for (int64_t column = 0; column < scores.size(1); ++column) {
      std::printf("%.9g ", scores.data_ptr<float>()[row * scores.size(1) + column]);
    }
    std::printf("\n");
  }
  return 0;
}
