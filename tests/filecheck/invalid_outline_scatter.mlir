// RUN: not %opt %s -p outline-scatter 2>&1 | %filecheck %s

// IREE's own code generation cannot link the C library.

// CHECK: UnsupportedLoopError: flat batching cannot call jn of the C library; blocked batching can

func.func private @jn(i32, f64) -> f64
func.func @loop(%start: i64, %stop: i64, %y: tensor<?xf64>) -> tensor<?xf64> {
  %first = arith.index_cast %start : i64 to index
  %last = arith.index_cast %stop : i64 to index
  %count = arith.subi %last, %first : index
  %order = arith.constant 1 : i32
  %empty = tensor.empty(%count) : tensor<?xf64>
  %value = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]}
      outs(%empty : tensor<?xf64>) {
  ^bb0(%old: f64):
    %bessel = func.call @jn(%order, %old) : (i32, f64) -> f64
    linalg.yield %bessel : f64
  } -> tensor<?xf64>
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %result = scf.for %k = %c0 to %count step %c1 iter_args(%into = %y) -> (tensor<?xf64>) {
    %new = tensor.extract %value[%k] : tensor<?xf64>
    %at = arith.addi %k, %first : index
    %next = tensor.insert %new into %into[%at] : tensor<?xf64>
    scf.yield %next : tensor<?xf64>
  }
  func.return %result : tensor<?xf64>
}
