// Loads a package that `server.package(path)` wrote, scores rows and compares with what the server answered.
//
//     score PACKAGE ROWS INPUTS [MOST]     ROWS: torch.save of a list of tensors, INPUTS inputs and then the outputs
//
// Neither Python nor loka runs here. Tensors lie where the package computes. Exit status 0: every output is within
// MOST of the server's, 1e-3 if it is not said.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

int main(int count, char** arguments) {
  if (count != 4 && count != 5) {
    std::cerr << "score PACKAGE ROWS INPUTS [MOST]\n";
    return 2;
  }
  c10::InferenceMode mode;
  std::ifstream file(arguments[2], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  auto held = torch::pickle_load(bytes).toList();
  const size_t inputs = std::stoul(arguments[3]);
  std::vector<torch::Tensor> given;
  for (size_t place = 0; place < inputs; ++place) given.push_back(held.get(place).toTensor());

  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  std::vector<torch::Tensor> found = model.run(given);

  double apart = 0;
  for (size_t place = 0; place < found.size(); ++place) {
    const auto expected = held.get(inputs + place).toTensor();
    apart = std::max(apart, (found[place] - expected).abs().max().item<double>());
  }
  std::cout << given[0].size(0) << " rows, " << found.size() << " outputs, largest difference " << apart << "\n";
  return apart <= (count == 5 ? std::stod(arguments[4]) : 1e-3) ? 0 : 1;
}
